"""The whole engine on the Triton kernels, in the interpreter: the same tokens as in plain torch.

The plain engine draws by the oracle of the sampling kernel, so that drawn tokens must agree too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pagestream.engine import LLM, SamplingParams, factory, model_choice
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.sampling_params import Constraint
from pagestream.engine.core.step_plan import NOT_FINITE, BlockCopy
from pagestream.engine.models.triton_linear import BlocksLinear
from pagestream.engine.runner.block_mover import KernelMover
from pagestream.engine.runner.kv_cache import KVCache, bytes_per_block
from pagestream.engine.sampling.choosing import NO_TOKEN, Choice, scores_of
from pagestream.engine.sampling.kernel_chooser import KernelChooser
from pagestream.kernels import reference
from pagestream.kernels.transfer import SharedMemory
from tests.tiny_models import make_checkpoint

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 20}
PROMPTS = [[5 + (7 * i + j * j) % 300 for j in range(length)] for i, length in enumerate((3, 18, 9, 23, 5, 20))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1.3, min_p=0.02, seed=4, max_tokens=3, ignore_eos=True, presence_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=4, min_tokens=3, logit_bias={7: 2.5, 9: -50.0}),
    SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=4, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, seed=6, max_tokens=3, allowed_token_ids=(11, 12, 200, 201), prompt_logprobs=1),
]


class ReferenceChooser:
    """A Chooser by the oracle of the sampling kernel."""

    applies_changes = False

    def begin(self, logits, scored, *, will_change):
        logprobs = torch.log_softmax(logits[[one.row for one in scored]], dim=-1)
        failed_rows = [row for row, top in enumerate(logits.amax(-1).tolist()) if not abs(top) < float("inf")]

        def choose(logits, rows, params, changes, *, are_changed):
            choice = Choice(failed={rows[index].seq_id: NOT_FINITE for index in failed_rows})
            for index, (row, one) in enumerate(zip(rows, params, strict=True)):
                for sample in row.samples if index not in failed_rows else ():
                    seed = sample.seed if sample.seed < 1 << 63 else sample.seed - (1 << 64)
                    scores = reference.sampling_scores(
                        logits[index].double(), temperature=0.0 if one.is_greedy else one.temperature, top_k=max(one.top_k, 0),
                        top_p=one.top_p, min_p=one.min_p, seed=seed, position=row.start + len(row.token_ids),
                    )  # fmt: skip
                    if scores.max() == float("-inf"):
                        choice.failed[row.seq_id] = NO_TOKEN
                    else:
                        choice.token_ids[index, sample.seq_id] = int(scores.argmax())
            choice.scores.update(scores_of(choice.token_ids, logprobs, scored))
            return choice

        return choose


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def plain(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """The engine in plain torch, drawing as the kernel does."""

    def step_parts(*args: Any) -> factory.StepParts:
        return dataclasses.replace(ORIGINAL_PARTS(*args), chooser=ReferenceChooser())

    with monkeypatch.context() as patch:
        patch.setattr(factory, "step_parts", step_parts)
        return LLM(str(path), kernels="torch", **(OPTIONS | options))


ORIGINAL_PARTS = factory.step_parts


def triton(path: Path, **options: Any) -> LLM:
    llm = LLM(str(path), kernels="triton", **(OPTIONS | options))
    assert isinstance(llm.llm_engine.executor._sampler._chooser, KernelChooser)  # type: ignore[attr-defined]
    return llm


def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [[tuple(answer.token_ids) for answer in output.outputs] for output in outputs]


def test_tokens_equal_plain_torch(llama, monkeypatch):
    """Prompts in chunks, forks, every kind of parameter; cold, and again from a warm prefix cache."""
    ours, theirs = triton(llama), plain(llama, monkeypatch)
    want = answers(theirs, PROMPTS, PARAMS)
    assert answers(ours, PROMPTS, PARAMS) == want
    before = ours.llm_engine.scheduler.counters.num_prefix_hit_tokens
    assert answers(ours, PROMPTS, PARAMS) == want
    assert ours.llm_engine.scheduler.counters.num_prefix_hit_tokens > before
    assert len(set(want[4])) == 2


CHANGED = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, repetition_penalty=1.8, presence_penalty=1.0, logit_bias={50: 4.0}),
    SamplingParams(temperature=0.9, seed=2, max_tokens=3, ignore_eos=True, typical_p=0.6, frequency_penalty=0.8),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, bad_word_ids=((50,), (51, 52)), bad_words=("x", "y"), logit_bias={50: 9.0}),
    SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, n=2, presence_penalty=0.9, logprobs=1),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
]
CONSTRAINED = [
    SamplingParams(temperature=0, max_tokens=3, constraint=Constraint("regex", "[a-e]{2,9}"), logprobs=4),
    SamplingParams(temperature=1.5, seed=1, max_tokens=3, constraint=Constraint("regex", "[0-9 ]{4,9}"), frequency_penalty=1.5),
]


def check_together_and_alone(path: Path, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams]) -> None:
    """All prompts in one step, then decodes of all of them; the first again by itself."""
    ours, theirs = triton(path, max_num_batched_tokens=64), plain(path, monkeypatch, max_num_batched_tokens=64)
    prompts = [prompt[:6] for prompt in PROMPTS[: len(params)]]
    want = answers(theirs, prompts, params)
    assert answers(ours, prompts, params) == want
    assert answers(ours, prompts[:1], params[0]) == want[:1]


def test_tokens_of_changed_rows_equal_those_of_the_processors(llama, monkeypatch):
    """Penalties, biases, bad words and logprobs beside a plain row, and beside a row that lists can't say."""
    check_together_and_alone(llama, monkeypatch, CHANGED)


def test_tokens_of_constrained_rows_equal_those_of_the_processors(llama, monkeypatch):
    pytest.importorskip("llguidance")
    check_together_and_alone(llama, monkeypatch, [*CONSTRAINED, *CHANGED[:1], CHANGED[-1]])


def test_logprobs_are_near_those_of_plain_torch(llama, monkeypatch):
    asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    got, want = (
        llm.generate(prompt_token_ids=[PROMPTS[1]], sampling_params=asked, use_tqdm=False)[0]
        for llm in (triton(llama), plain(llama, monkeypatch))
    )
    got_scores = [token.logprob for token in (*got.outputs[0].logprobs, *got.prompt_logprobs[1:])]
    want_scores = [token.logprob for token in (*want.outputs[0].logprobs, *want.prompt_logprobs[1:])]
    torch.testing.assert_close(torch.tensor(got_scores), torch.tensor(want_scores), atol=1e-4, rtol=0)


# Three requests that need six blocks where there are five, and the last token of each but the first block's.
CROWD = [prompt[:14] for prompt in (PROMPTS[1], PROMPTS[3], PROMPTS[5])]
CROWD_PARAMS = [SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=5, ignore_eos=True) for index in range(3)]
CROWDED: dict[str, Any] = {"num_kv_blocks": 5, "swap_space": 0.001, "enable_prefix_caching": False, "max_num_batched_tokens": 42}


def test_tokens_stay_when_requests_are_swapped(llama, monkeypatch):
    want = answers(plain(llama, monkeypatch), CROWD, CROWD_PARAMS)
    ours = triton(llama, preemption_mode="swap", **CROWDED)
    assert answers(ours, CROWD, CROWD_PARAMS) == want
    assert ours.llm_engine.scheduler.counters.num_preempted_swap > 0


class RoundedAttention(TorchAttention):
    """Plain torch over keys and values that went through the oracle's own 8-bit codes."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def forward(self, q, k, v, cache, metadata, spec):
        rounded = []
        for x in (k, v):
            codes, scales = reference.quantise(x, self.dtype)
            rounded.append((codes.double() * scales.double()[..., None]).float())
        return super().forward(q, *rounded, cache, metadata, spec)


def test_tokens_of_int8_pages_equal_those_of_the_codes_themselves(llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_choice, "TorchAttention", lambda: RoundedAttention(torch.int8))
        theirs = plain(llama, monkeypatch)
    ours = triton(llama, kv_cache_dtype="int8")
    assert ours.llm_engine.executor._cache.layers[0].k.dtype == torch.int8  # type: ignore[attr-defined]
    assert answers(ours, PROMPTS[1:2], PARAMS[1]) == answers(theirs, PROMPTS[1:2], PARAMS[1])


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_tokens_of_converted_weights_equal_those_of_plain_torch_with_the_weights_unpacked(tmp_path, monkeypatch, quantization):
    """All linears in the kernel that reads blocks; prompts in chunks and in company, and each alone."""
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, intermediate_size=128)
    ours = triton(path, quantization=quantization)
    prompts, params = PROMPTS[:2], [dataclasses.replace(one, max_tokens=2) for one in PARAMS[:2]]
    want = answers(plain(path, monkeypatch, quantization=quantization), prompts, params)
    assert answers(ours, prompts, params) == want
    assert [answers(ours, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)] == want
    layer = ours.llm_engine.executor._model._layers[0]  # type: ignore[attr-defined]
    assert all(isinstance(linear, BlocksLinear) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16])
def test_blocks_keep_their_bytes_through_a_swap(dtype):
    """Codes and scales; between pools, and back to other places."""
    link, device = SharedMemory(), torch.device("cpu")
    shape = ModelShape(vocab_size=1, max_model_len=1, num_layers=2, num_kv_heads=2, head_size=16, eos_token_ids=frozenset())
    cache = KVCache(
        shape, block_size=16, num_blocks=6, num_swap_blocks=3, dtype=dtype, device=device, mover=KernelMover(link, device)
    )
    pages = [page for layer in cache.layers for page in (layer.k, layer.v)]
    for number, page in enumerate(pages):
        page.view(torch.uint8).copy_((torch.arange(page.nbytes) * 7 + number).view(page.view(torch.uint8).shape) % 251)
    before = [page.view(torch.uint8).clone() for page in pages]
    cache.swap_out([BlockCopy(1, 2), BlockCopy(4, 0)])
    cache.swap_in([BlockCopy(2, 5), BlockCopy(0, 3)])
    cache.copy([BlockCopy(5, 0)])
    for page, was in zip(pages, before, strict=True):
        now = page.view(torch.uint8)
        assert all(torch.equal(now[target], was[source]) for target, source in ((5, 1), (3, 4), (0, 1), (1, 1), (2, 2), (4, 4)))
    assert bytes_per_block(shape, 16, dtype) == sum(page[0].nbytes for page in pages)


def test_plain_torch_gives_the_tokens_of_the_kernels_over_int8_pages(llama, monkeypatch):
    """The interpreter cuts off instead of rounding to floats of 8 bits, so that theirs can't be compared here."""
    theirs = plain(llama, monkeypatch, kv_cache_dtype="int8")
    assert answers(triton(llama, kv_cache_dtype="int8"), PROMPTS[1:2], PARAMS[1]) == answers(theirs, PROMPTS[1:2], PARAMS[1])


def test_models_of_transformers_run_on_the_kernels_too(tmp_path, monkeypatch):
    """With a softcap, a window in every other layer, and a norm of its own kind."""
    path = make_checkpoint("gemma2", tmp_path, num_hidden_layers=2)
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), PARAMS[1]]
    assert answers(triton(path), PROMPTS[:2], params) == answers(plain(path, monkeypatch), PROMPTS[:2], params)


def test_triton_without_a_gpu_or_the_interpreter_is_refused(llama, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(StartError, match="TRITON_INTERPRET=1"):
        triton(llama)
