"""Who is guilty of a step that fails: one request, several, all of them, or the device; and what it means to run a step again."""

import itertools
import logging
import math
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagestream.engine import EngineArgs, Fault, LLMEngine, SamplingParams, output_processor
from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.step_plan import (
    NOT_FINITE,
    Sample,
    SampledTokens,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from pagestream.engine.intake import RequestOptions
from pagestream.engine.isolation import PROBE_SEQ_ID, execute_isolated


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class SmallExecutor:
    """Computes at most so many tokens at once; a row's result says which tokens it saw."""

    def __init__(self, capacity, error=MemoryError):
        self.capacity, self.error = capacity, error
        self.seen: dict[int, list[int]] = {}

    def execute(self, plan):
        if plan.num_tokens > self.capacity:
            raise self.error("too large")
        sampled, scored = {}, {}
        for row in plan.scheduled:
            known = self.seen.setdefault(row.seq_id, [])
            assert row.start <= len(known), "a chunk before its turn"
            known[row.start :] = row.token_ids
            for sample in row.samples:
                sampled[sample.seq_id] = SampledTokens((sum(known),))
            if row.scored_token_ids:
                scored[row.seq_id] = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in row.scored_token_ids)
        return StepResult(plan.step_id, sampled, scored)


def plan_of(*lengths):
    rows = [
        ScheduledSequence(seq_id, tuple(range(length)), 0, (0,), (Sample(seq_id, 0),), tuple(range(1, length)))
        for seq_id, length in enumerate(lengths, 1)
    ]
    return StepPlan(1, scheduled=tuple(rows))


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
@pytest.mark.parametrize("capacity", [1, 2, 7, 40, 63])
def test_a_step_too_large_for_the_memory_is_computed_in_parts(capacity, error):
    plan = plan_of(40, 1, 17, 1, 5)
    expected = SmallExecutor(1000).execute(plan)
    result = execute_isolated(SmallExecutor(capacity, error), plan)
    assert result == expected


def test_only_where_nobodys_token_can_be_computed_is_it_given_up():
    for plan in (plan_of(9), plan_of(9, 3)):
        with pytest.raises(EngineDead, match="too large"):
            execute_isolated(SmallExecutor(0), plan)


class GuiltyExecutor(SmallExecutor):
    """Fails with each of these rows; `kind` says how."""

    def __init__(self, guilty, kind):
        super().__init__(1000)
        self.guilty, self.kind = guilty, kind

    def execute(self, plan):
        found = self.guilty & {row.seq_id for row in plan.scheduled}
        if found and self.kind == "raise":
            raise ValueError("guilty")
        result = super().execute(plan)
        return replace(result, failed=dict.fromkeys(found, "not finite numbers"))


@pytest.mark.parametrize("kind", ["raise", "nan"])
@pytest.mark.parametrize("guilty", [set(found) for size in range(5) for found in itertools.combinations((1, 2, 3, 4), size)])
def test_whoever_is_guilty_fails_alone_also_where_all_are(guilty, kind):
    result = execute_isolated(GuiltyExecutor(guilty, kind), plan_of(4, 1, 9, 1))
    assert set(result.failed) == guilty
    assert set(result.sampled) - guilty == {1, 2, 3, 4} - guilty


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_fault_that_hits_even_nobodys_row_is_the_devices(kind):
    for lengths in ((9,), (4, 1, 9)):
        everybody = {PROBE_SEQ_ID, *range(1, 1 + len(lengths))}
        with pytest.raises(EngineDead, match="guilty" if kind == "raise" else "finite"):
            execute_isolated(GuiltyExecutor(everybody, kind), plan_of(*lengths))


def test_other_errors_are_not_answered_with_smaller_chunks():
    result = execute_isolated(SmallExecutor(5, ValueError), plan_of(9, 3))
    assert result.failed == {1: "ValueError: too large"}
    assert list(result.sampled) == [2]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_that_are_no_numbers_are_never_sent(tiny_llama, tmp_path, budget, max_tokens):
    poison = 50
    folder = shutil.copytree(tiny_llama, tmp_path / "spoilt")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(folder), num_kv_blocks=32, max_num_batched_tokens=budget, max_num_seqs=4, cpu_threads=1)
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1)
    engine.add_request("spoilt", [*range(60, 90), poison, *range(90, 110)], params)
    engine.add_request("other", list(range(60, 90)), params)
    ends, scores = {}, defaultdict(list)
    while engine.has_unfinished_requests():
        for output in engine.step():
            scores[output.request_id] += output.prompt_logprobs or ()
            if output.finished:
                ends[output.request_id] = output.error
    assert ends == {"spoilt": NOT_FINITE, "other": None}
    assert len(scores["other"]) == 30
    assert all(math.isfinite(score.logprob) for found in scores.values() for score in found if score is not None)
    assert engine.stats().num_used_blocks == 0


def test_a_request_that_alone_runs_out_fails_and_the_others_keep_their_tokens(tiny_llama):
    def tokens(fault):
        engine = LLMEngine.from_engine_args(
            EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1, enable_fault_injection=True)
        )
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
        engine.add_request("marked", "the quick brown fox", params, options=RequestOptions(fault=fault))
        engine.add_request("other", "the lazy dog", params)
        found = {"marked": [], "other": []}
        errors = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] += [token for answer in output.outputs for token in answer.token_ids]
                errors[output.request_id] = output.error
        assert engine.stats().num_used_blocks == 0
        return found, errors

    expected, _ = tokens(None)
    found, errors = tokens(Fault("oom", at_token=4))
    assert found == {"marked": expected["marked"][:4], "other": expected["other"]}
    assert "MemoryError" in errors["marked"]
    assert errors["other"] is None


@pytest.mark.parametrize("kind", ["raise", "oom", "nan"])
def test_blocks_of_a_prompt_that_failed_are_not_found_by_the_next(tiny_llama, kind):
    prompt, params = list(range(3, 103)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=64, cpu_threads=1, enable_fault_injection=True)

    def tokens(engine):
        engine.add_request("sound", prompt, params)
        found = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                found += [token for answer in output.outputs for token in answer.token_ids]
        return found

    expected = tokens(LLMEngine.from_engine_args(args))
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("marked", prompt, params, options=RequestOptions(fault=Fault(kind)))
    while engine.has_unfinished_requests():
        engine.step()
    assert tokens(engine) == expected


@pytest.fixture(scope="module")
def marked_engine(tiny_llama):
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1, enable_fault_injection=True)
    return LLMEngine.from_engine_args(args)


def answers_of(engine, faults, kinds):
    """Tokens and error by request; the i-th one of `kinds` is (prompt, parameters), the faults are by the request's place."""
    found: dict[str, dict[int, list[int]]] = {str(place): defaultdict(list) for place in range(len(kinds))}
    errors: dict[str, str | None] = {}
    for place, (prompt, params) in enumerate(kinds):
        engine.add_request(str(place), prompt, params, options=RequestOptions(fault=faults.get(place)))
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                found[output.request_id][answer.index] += answer.token_ids
            if output.finished:
                errors[output.request_id] = output.error
    engine.scheduler.blocks.check()
    assert engine.stats().num_used_blocks == 0
    return found, errors


KINDS = [
    ("the quick brown fox", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)),
    (list(range(3, 150)), SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True)),
    ("the lazy dog", SamplingParams(temperature=1, seed=6, n=3, max_tokens=8, ignore_eos=True)),
]


@pytest.mark.parametrize("at_token", [0, 1, 4])
@pytest.mark.parametrize(
    ("kind", "stage"),
    [(kind, stage) for kind in ("raise", "oom") for stage in ("forward", "sample", "judge")] + [("nan", "forward")],
)
@pytest.mark.parametrize("guilty", [{0}, {2}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_each_guilty_request_fails_by_itself_and_all_others_are_untouched(marked_engine, guilty, kind, stage, at_token, caplog):
    caplog.set_level(logging.CRITICAL)
    expected, _ = answers_of(marked_engine, {}, KINDS)
    found, errors = answers_of(marked_engine, dict.fromkeys(guilty, Fault(kind, stage, at_token)), KINDS)
    for place in range(len(KINDS)):
        if place in guilty:
            assert errors[str(place)], "a guilty request got no error"
        else:
            assert errors[str(place)] is None
            assert found[str(place)] == expected[str(place)]


class FailingProcessor:
    """A logits processor that fails, in one of its calls, on sequences whose prompt begins with MARK."""

    MARK = 77

    def __init__(self, call):
        self.call = call
        self.marked: set[int] = set()

    def admit(self, admitted):
        if admitted.prompt_token_ids[0] == self.MARK:
            self.marked.add(admitted.seq_id)
            self.fail("admit", [admitted.seq_id])

    def observe(self, seq_id, token_ids):
        self.fail("observe", [seq_id])

    def apply(self, logits, seq_ids):
        self.fail("apply", seq_ids)
        return False

    def concerns(self, seq_id):
        return seq_id in self.marked

    def retire(self, seq_id):
        self.fail("retire", [])

    def fail(self, call, seq_ids):
        if call == self.call and self.marked.intersection(seq_ids):
            raise KeyError(f"failed in {call}")


@pytest.mark.parametrize("call", ["admit", "observe", "apply"])
@pytest.mark.parametrize("num_guilty", [1, 2])
def test_a_logits_processor_that_fails_fails_its_request(tiny_llama, call, num_guilty, caplog):
    caplog.set_level(logging.CRITICAL)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1))
    expected, _ = answers_of(engine, {}, KINDS)
    engine.executor._sampler._processors += (FailingProcessor(call),)
    found, errors = answers_of(engine, {}, [*KINDS, *[([FailingProcessor.MARK, 8, 9], KINDS[0][1])] * num_guilty])
    for place in range(len(KINDS)):
        assert (errors[str(place)], found[str(place)]) == (None, expected[str(place)])
    for place in range(len(KINDS), len(KINDS) + num_guilty):
        assert f"failed in {call}" in errors[str(place)]
        assert sum(map(len, found[str(place)].values())) == (call == "observe")


def test_a_text_that_can_not_be_begun_fails_its_request(tiny_llama, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1))
    expected, _ = answers_of(engine, {}, KINDS)
    params = replace(KINDS[0][1], stop=("unlucky",))
    begin = output_processor.StopStrings

    def fail(stops, **options):
        if stops:
            raise KeyError("no text")
        return begin(stops, **options)

    monkeypatch.setattr(output_processor, "StopStrings", fail)
    request = engine.intake.make_request("guilty", "the", params, arrival_time_s=0.0)
    (output,) = engine.admit(request)
    assert output.finished
    assert "no text" in output.error
    found, errors = answers_of(engine, {}, KINDS)
    assert (found, set(errors.values())) == (expected, {None})


def run(engine):
    while engine.has_unfinished_requests():
        engine.step()


class Broken:
    """An executor whose device is lost from some step on."""

    def __init__(self, executor, num_steps):
        self.executor, self.num_left = executor, num_steps

    def execute(self, plan):
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("the device is lost")
        return self.executor.execute(plan)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_lost_device_ends_the_engine_whoever_is_on_it(tiny_llama, num_requests):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1))
    for place, (prompt, params) in enumerate(KINDS[:num_requests]):
        engine.add_request(str(place), prompt, params)
    engine.executor = Broken(engine.executor, 3)
    with pytest.raises(EngineDead, match="the device is lost"):
        run(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("stage", ["forward", "sample"])
def test_a_step_run_again_does_not_move_blocks_a_second_time(tiny_llama, mode, stage):
    """Those who gave way in the very step that failed get their own content back, not that of the blocks' new owners."""

    def tokens(fault_in_each_step):
        engine = LLMEngine.from_engine_args(
            EngineArgs(model=str(tiny_llama), num_kv_blocks=40, preemption_mode=mode, swap_space=0.01, cpu_threads=1)
        )
        if fault_in_each_step:
            engine.executor = FailsOnce(engine.executor, stage)
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        found: dict[str, list[int]] = {}
        for index in range(8):
            engine.add_request(str(index), [20 + index, 5, 9] * 6, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None
                found.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        counters = engine.scheduler.counters
        assert (counters.num_preempted_swap if mode == "swap" else counters.num_preempted_recompute) > 0
        return found

    assert tokens(True) == tokens(False)


class FailsOnce:
    """Every step of several rows fails the first time, before or after it has written its keys and values."""

    def __init__(self, executor, stage):
        self.executor, self.stage = executor, stage
        self.failed_steps: set[int] = set()

    def execute(self, plan):
        is_due = len(plan.scheduled) > 1 and plan.step_id not in self.failed_steps
        if is_due:
            self.failed_steps.add(plan.step_id)
        if is_due and self.stage == "forward":
            raise RuntimeError("once")
        result = self.executor.execute(plan)
        if is_due:
            raise RuntimeError("once")
        return result
