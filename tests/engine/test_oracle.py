"""Greedy tokens equal transformers.generate, for the default model and for a tiny random checkpoint of each architecture."""

import pytest
import torch

from pagestream.engine import LLM, SamplingParams
from tests.oracle import assert_same_until_tie, reference_greedy
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\n",
    "SELECT name FROM users WHERE",
    "The three primary colours are",
    "Q: What is the largest planet?\nA:",
    "In the beginning",
    "A recipe for pancakes:\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
]


def test_the_default_model_equals_generate(smollm2_reference):
    llm = LLM(dtype="float32", kv_cache_memory=0.25)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert len(outputs) == 12
    for output in outputs:
        assert_same_until_tie(output.outputs[0].token_ids, reference_greedy(smollm2_reference, output.prompt_token_ids, 16))


WIDE_HEADS = {"head_dim": 288}  # more than the CPU's own attention takes


@pytest.mark.parametrize(("arch", "changes"), [*((arch, {}) for arch in ARCHITECTURES), ("gemma2", WIDE_HEADS), ("llama", WIDE_HEADS)])
def test_tiny_checkpoints_equal_generate(arch, changes, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(arch, tmp_path, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 2, 3, 5, 15, 16, 17, 31, 40, 64, 75, 95)
    prompts = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    llm = LLM(model=str(folder), dtype="float32", num_kv_blocks=400, max_num_batched_tokens=64, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert_same_until_tie(output.outputs[0].token_ids, reference_greedy(model, prompt, 32))
