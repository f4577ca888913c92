"""Beam search equals transformers.generate(num_beams=…): tokens, scores and order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagestream.engine import LLM, RequestOutput, SamplingParams
from tests.tiny_models import ARCHITECTURES, EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint

# Sums of logprobs of two float32 implementations; answers whose scores are closer may change places.
TOLERANCE = 2e-3

STOPS = frozenset(range(40, 80))  # a quarter of what a random model says, so that most beams end early


def reference(model: Any, prompt: list[int], params: SamplingParams, eos: list[int] | None) -> list[tuple[list[int], float]]:
    """Answers with their scores, best first."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            do_sample=False,
            num_beams=params.num_sequences,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    answers = []
    for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [place for place, token_id in enumerate(tokens) if eos and token_id in eos]
        answers.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return answers


def assert_same(output: RequestOutput, expected: list[tuple[list[int], float]], params: SamplingParams) -> None:
    assert [answer.index for answer in output.outputs] == list(range(params.n))
    got = [
        (list(answer.token_ids), answer.cumulative_logprob / len(answer.token_ids) ** params.length_penalty)
        for answer in output.outputs
    ]
    for (tokens, score), (want, want_score) in zip(got, expected, strict=True):
        assert score == pytest.approx(want_score, abs=TOLERANCE)
        if tokens != want:
            near = [other for other, other_score in expected if abs(other_score - score) < TOLERANCE]
            assert tokens in near or len(near) > 1 or want_score == expected[-1][1], (tokens, want, score, want_score)


CASES = [
    SamplingParams(use_beam_search=True, temperature=0, n=2, max_tokens=12, ignore_eos=True),
    SamplingParams(use_beam_search=True, temperature=0, n=2, best_of=5, max_tokens=16, stop_token_ids=STOPS),
    SamplingParams(use_beam_search=True, temperature=0, n=4, max_tokens=20, early_stopping=True, stop_token_ids=STOPS),
    SamplingParams(
        use_beam_search=True, temperature=0, n=3, max_tokens=20, early_stopping="never", length_penalty=2.0, stop_token_ids=STOPS
    ),
    SamplingParams(
        use_beam_search=True, temperature=0, n=1, best_of=3, max_tokens=20, min_tokens=6, length_penalty=-0.5, stop_token_ids=STOPS
    ),
]


def end_ids(params: SamplingParams) -> list[int] | None:
    eos = [] if params.ignore_eos else [EOS_TOKEN_ID]
    return [*eos, *sorted(params.stop_token_ids)] or None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_checkpoints_equal_generate(arch, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(arch, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 33)]
    # No more positions than the scaled rotary tables were trained for, whose factors would change beyond.
    llm = LLM(model=str(folder), dtype="float32", num_kv_blocks=400, max_num_batched_tokens=64, max_model_len=128)
    for params in CASES:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_same(output, reference(model, prompt, params, end_ids(params)), params)
    blocks = llm.llm_engine.scheduler.blocks
    blocks.check()
    assert blocks.device.num_free == 400


def test_the_default_model_equals_generate(smollm2_reference):
    llm = LLM(dtype="float32", kv_cache_memory=0.25)
    eos = sorted(llm.llm_engine.executor._model.shape.eos_token_ids)
    params = SamplingParams(use_beam_search=True, temperature=0, n=3, max_tokens=16, length_penalty=0.8)
    prompts = ["The capital of France is", "Once upon a time there was a", "Q: What is the largest planet?\nA:"]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert_same(output, reference(smollm2_reference, list(output.prompt_token_ids), params, eos), params)
