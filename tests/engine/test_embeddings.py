"""Embeddings against transformers' hidden states, and their bits whatever goes on beside them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagestream.engine import LLM, SamplingParams
from pagestream.engine.core.request import Fault, Pooling
from pagestream.engine.core.step_plan import ScheduledSequence, StepPlan, StepResult
from pagestream.engine.intake import RequestOptions
from pagestream.engine.isolation import execute_isolated
from pagestream.engine.pooling import EmbeddingSum
from pagestream.engine.runner.pooling import pooled_sums
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

CPU = {"device": "cpu", "cpu_threads": 1, "num_kv_blocks": 128}
LENGTHS = (1, 2, 15, 16, 17, 40, 90)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(5, VOCAB_SIZE - 30) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), **CPU)


def expected(model: Any, prompt: Sequence[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        states = model.base_model(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0].double()
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return pooled / pooled.norm()


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "opt"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_transformers(arch, pooling, tmp_path_factory):
    folder = make_checkpoint(arch, tmp_path_factory.mktemp("models") / arch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = LLM(str(folder), **CPU).embed(PROMPTS, pooling=pooling, use_tqdm=False)
    for prompt, embedding in zip(PROMPTS, found, strict=True):
        assert math.fsum(number * number for number in embedding) == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(torch.tensor(embedding).double(), expected(model, prompt, pooling), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_embeddings_of_the_default_model_equal_transformers(smollm2_reference):
    llm = LLM(dtype="float32", device="cpu", num_kv_blocks=128)
    texts = ["The sky is blue.", "京都の冬は寒い。", "A lighthouse keeper saw the old copper roofs in the rain. " * 9]
    for pooling in ("mean", "last"):
        for text, embedding in zip(texts, llm.embed(texts, pooling=pooling, use_tqdm=False), strict=True):
            want = expected(smollm2_reference, llm.get_tokenizer().encode(text, True), pooling)
            torch.testing.assert_close(torch.tensor(embedding).double(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_same_bits_alone_in_company_and_in_chunks(llm, tiny_llama, pooling):
    alone = [llm.embed([prompt], pooling=pooling, use_tqdm=False)[0] for prompt in PROMPTS]
    assert llm.embed(PROMPTS, pooling=pooling, use_tqdm=False) == alone  # with a warm prefix cache, too
    for num_tokens in (7, 33):
        chunked = LLM(str(tiny_llama), max_num_batched_tokens=num_tokens, **CPU)
        for number, prompt in enumerate(PROMPTS):  # who decodes beside them
            chunked.llm_engine.add_request(f"beside-{number}", prompt, SamplingParams(max_tokens=30, ignore_eos=True, seed=number))
        options = RequestOptions(pooling=Pooling(pooling))
        assert embed_beside(chunked, PROMPTS, options) == alone


def embed_beside(llm: LLM, prompts: Sequence[Sequence[int]], options: RequestOptions) -> list[tuple[float, ...] | None]:
    """The embeddings, with whatever else is in the engine; steps until nothing is left."""
    found: dict[str, tuple[float, ...] | None] = {}
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"embed-{number}", prompt, options=options)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = output.embedding
                assert (output.embedding is None) == output.request_id.startswith("beside")
    return [found[f"embed-{number}"] for number in range(len(prompts))]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_same_bits_after_giving_way(llm, tiny_llama, mode):
    options = {**CPU, "num_kv_blocks": 18, "swap_space": 0.01, "preemption_mode": mode, "max_num_batched_tokens": 24}
    tight = LLM(str(tiny_llama), **options)
    engine = tight.llm_engine
    for number in range(4):
        engine.add_request(f"beside-{number}", PROMPTS[3], SamplingParams(max_tokens=60, ignore_eos=True, seed=number))
    for _ in range(30):
        engine.step()
    long = prompts_of([150, 100])
    assert embed_beside(tight, long, RequestOptions(pooling=Pooling.MEAN)) == llm.embed(long, use_tqdm=False)
    counters = engine.scheduler.counters
    assert counters.num_preempted_recompute + counters.num_preempted_swap > 0
    assert engine.scheduler.blocks.device.num_free == engine.scheduler.blocks.device.num_blocks


def test_generation_is_left_as_it_was(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    before = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
    llm.embed(PROMPTS, use_tqdm=False)
    after = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
    assert [output.outputs for output in after] == [output.outputs for output in before]
    assert all(output.embedding is None for output in after)


def test_a_fault_belongs_to_one_input(tiny_llama):
    llm = LLM(str(tiny_llama), enable_fault_injection=True, **CPU)
    alone = llm.embed(PROMPTS[3:], use_tqdm=False)
    options = RequestOptions(pooling=Pooling.MEAN)
    llm.llm_engine.add_request("guilty", PROMPTS[0], options=replace(options, fault=Fault("raise")))
    found: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS[3:]):
        llm.llm_engine.add_request(str(number), prompt, options=options)
    while llm.llm_engine.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    assert found["guilty"].error
    assert [found[str(number)].embedding for number in range(len(alone))] == alone


def test_states_that_are_not_finite_fail_their_own_sequence():
    hidden = torch.ones(6, 4)
    hidden[3, 1] = float("nan")
    sums = pooled_sums(hidden, [(1, slice(0, 2)), (2, slice(2, 4)), (3, slice(4, 6))])
    assert sorted(sums.pooled) == [1, 3]
    assert list(sums.failed) == [2]


@pytest.mark.parametrize("num_pooled", [1, 3, 8])
def test_a_row_too_large_for_the_memory_pools_the_same_tokens_in_two(num_pooled):
    class Small:
        """Has memory for three tokens, whose states are their ids."""

        def execute(self, plan: StepPlan) -> StepResult:
            if plan.num_tokens > 3:
                raise MemoryError
            sums = {row.seq_id: (sum(row.token_ids[-row.num_pooled :]),) for row in plan.scheduled if row.num_pooled}
            return StepResult(plan.step_id, {}, pooled=sums)

    row = ScheduledSequence(1, tuple(range(10, 18)), 0, (0,), num_pooled=num_pooled)
    result = execute_isolated(Small(), StepPlan(0, scheduled=(row,)))
    assert result.pooled == {1: (sum(row.token_ids[-num_pooled:]),)}


def test_unknown_pooling_is_refused(llm):
    with pytest.raises(ValueError, match="max"):
        llm.embed("text", pooling="max")


def test_states_that_sum_up_to_nothing_have_no_direction():
    pooled = EmbeddingSum()
    pooled.add(0, (3, -4))
    pooled.add(16, (-3, 4))
    assert pooled.direction() == (0.0, 0.0)
