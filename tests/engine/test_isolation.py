"""Running out of memory is the step's fault, not a request's."""

import pytest

from pagestream.engine import EngineArgs, Fault, LLMEngine, SamplingParams
from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.step_plan import Sample, SampledTokens, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from pagestream.engine.intake import RequestOptions
from pagestream.engine.isolation import execute_isolated


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


def test_only_where_single_tokens_do_not_fit_is_it_given_up():
    result = execute_isolated(SmallExecutor(0), plan_of(9))
    assert list(result.failed) == [1]
    with pytest.raises(EngineDead):
        execute_isolated(SmallExecutor(0), plan_of(9, 3))


def test_two_answers_of_one_request_may_both_be_guilty():
    result = execute_isolated(SmallExecutor(0), plan_of(9, 3), lambda seq_id: "the same")
    assert sorted(result.failed) == [1, 2]


def test_other_errors_are_not_answered_with_smaller_chunks():
    result = execute_isolated(SmallExecutor(5, ValueError), plan_of(9, 3))
    assert result.failed == {1: "ValueError: too large"}
    assert list(result.sampled) == [2]


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
