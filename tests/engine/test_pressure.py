"""Memory under pressure, with real models: more is promised than fits, everybody gets his answer, and sharing pays."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from pagestream.engine import LLM, RequestOutput, SamplingParams, StepStats, fold


@dataclass(frozen=True)
class Run:
    answers: dict[str, RequestOutput]
    peak_blocks: int
    cpu_s: float


def run(llm: LLM, prompts: dict[str, list[int]], params: SamplingParams) -> Run:
    engine = llm.llm_engine
    deltas: dict[str, list[RequestOutput]] = {request_id: [] for request_id in prompts}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    peak, started_s = 0, time.process_time()
    while engine.has_unfinished_requests():
        for output in engine.step():
            deltas[output.request_id].append(output)
        peak = max(peak, engine.stats().num_used_blocks)
    elapsed_s = time.process_time() - started_s
    return Run({request_id: fold(parts) for request_id, parts in deltas.items()}, peak, elapsed_s)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_ten_streams_in_a_pool_for_three_get_their_solo_answers(tiny_llama, mode):
    options = {"model": str(tiny_llama), "dtype": "float32", "num_kv_blocks": 40, "preemption_mode": mode, "swap_space": 0.01}
    llm = LLM(**options)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = {str(index): [20 + index, 5, 9] * 6 for index in range(10)}
    together = run(llm, prompts, params)
    scheduler = llm.llm_engine.scheduler
    counters = scheduler.counters
    assert counters.num_preempted_recompute + counters.num_preempted_swap > 0
    if mode != "auto":
        assert (counters.num_preempted_swap if mode == "recompute" else counters.num_preempted_recompute) == 0
    assert scheduler.blocks.device.num_free == 40
    assert scheduler.blocks.host.num_free == scheduler.blocks.host.num_blocks
    scheduler.blocks.check()
    alone = LLM(**options)
    for request_id, prompt in prompts.items():
        expected = run(alone, {request_id: prompt}, params).answers[request_id]
        assert together.answers[request_id].outputs == expected.outputs
        assert together.answers[request_id].usage.num_output_tokens == 200


def test_eight_answers_to_a_long_prompt_share_its_blocks_and_its_time():
    llm = LLM(num_kv_blocks=400, enable_prefix_caching=False)
    prompt = [100 + place % 997 for place in range(512)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True)
    separate = run(llm, {str(index): prompt for index in range(8)}, params)
    shared = run(llm, {"all": prompt}, SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True, n=8))
    assert len({answer.token_ids for answer in shared.answers["all"].outputs}) == 8
    assert shared.peak_blocks <= separate.peak_blocks / 4
    assert shared.cpu_s < separate.cpu_s / 2


def test_a_short_request_beside_a_prompt_of_3000_tokens_has_its_first_token_before_it():
    engine = LLM(num_kv_blocks=400).llm_engine
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request("long", [100 + place % 997 for place in range(3000)], params)
    engine.step()
    engine.add_request("short", [100, 101, 102], params)
    told: list[str] = []
    while engine.has_unfinished_requests():
        told += [output.request_id for output in engine.step()]
    assert told.index("short") < told.index("long")


class Listener:
    """Sums up what the engine tells."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.num_tokens = 0

    def step_done(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def tokens_emitted(self, num_tokens: int, seconds_since_last: float | None) -> None:
        self.num_tokens += num_tokens

    def prompt_computed(self, num_prompt_tokens: int, num_cached_tokens: int) -> None: ...
    def first_token(self, seconds_since_arrival: float) -> None: ...
    def request_finished(self, stats: object) -> None: ...
    def request_rejected(self, reason: str) -> None: ...


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_what_was_copied_moved_and_computed_again_reaches_the_listener(tiny_llama, mode):
    from pagestream.engine import EngineArgs, LLMEngine

    listener = Listener()
    args = EngineArgs(model=str(tiny_llama), dtype="float32", num_kv_blocks=20, preemption_mode=mode, swap_space=0.01)
    engine = LLMEngine.from_engine_args(args, listener)
    asked = (
        SamplingParams(temperature=1, seed=1, n=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1, seed=2, n=1, best_of=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, use_beam_search=True, n=1, best_of=3, max_tokens=40, ignore_eos=True),
    )
    for index, params in enumerate(asked):
        engine.add_request(str(index), [30 + index] * 19, params)
    usages = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            usages[output.request_id] = output.usage
    counters = engine.scheduler.counters
    for name in (
        "num_copied_blocks", "num_swapped_out_blocks", "num_swapped_in_blocks", "num_preempted_swap", "num_preempted_recompute",
        "num_recomputed_tokens",
    ):  # fmt: skip
        assert sum(getattr(stats, name) for stats in listener.steps) == getattr(counters, name), name
    assert counters.num_copied_blocks > 0
    assert (counters.num_swapped_in_blocks if mode == "swap" else counters.num_recomputed_tokens) > 0
    assert listener.num_tokens == sum(usage.num_output_tokens for usage in usages.values())
