"""Why a request took as long as it did: on its last output where asked for, and by its id for some time after."""

import pytest

from pagestream.engine import LLM, FinishReason, RequestOutput, SamplingParams, Usage
from pagestream.engine.core.request import Request
from pagestream.engine.core.timeline import Timeline
from pagestream.engine.intake import RequestOptions
from pagestream.engine.watch import MAX_KEPT_REQUESTS, MAX_KEPT_S, RequestWatch
from tests.tiny_models import make_checkpoint

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


def run(checkpoint: str, mode: str, options: RequestOptions) -> tuple[LLM, dict[str, RequestOutput]]:
    """Five requests that do not fit at once."""
    llm = LLM(
        model=checkpoint, dtype="float32", num_kv_blocks=14, swap_space=0.01, preemption_mode=mode, max_num_batched_tokens=64
    )
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for index in range(5):
        engine.add_request(str(index), [5 + index] * 40, params, options=options)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.timeline is None or output.finished
            last[output.request_id] = output
    return llm, last


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_last_output_says_what_happened(checkpoint, mode):
    llm, last = run(checkpoint, mode, RequestOptions(include_timeline=True))
    timelines = [output.timeline for output in last.values()]
    counters = llm.llm_engine.scheduler.counters
    assert sum(one.num_preemptions_swap for one in timelines) == counters.num_preempted_swap
    assert sum(one.num_preemptions_recompute for one in timelines) == counters.num_preempted_recompute
    assert sum(one.num_recomputed_tokens for one in timelines) == counters.num_recomputed_tokens
    moved = counters.num_swapped_out_blocks + counters.num_swapped_in_blocks
    per_block = 2 * 3 * 2 * BLOCK_SIZE * 16 * 4  # keys and values, layers, heads, tokens, head size, float32
    assert sum(one.num_swapped_bytes for one in timelines) == moved * per_block
    assert (counters.num_preempted_swap if mode == "swap" else counters.num_preempted_recompute) > 0
    for one in timelines:
        assert sum(one.prefill_chunks) >= 40
        assert one.num_steps >= 50
        assert 0 <= one.queued_s <= one.first_token_s <= one.last_token_s


def test_nobody_gets_a_timeline_unasked_and_everybody_can_be_looked_up(checkpoint):
    llm, last = run(checkpoint, "recompute", RequestOptions())
    for request_id, output in last.items():
        assert output.timeline is None
        info = llm.llm_engine.request_info(request_id)
        assert (info.status, info.finish_reason, info.usage) == ("finished", FinishReason.LENGTH, output.usage)
        assert info.timeline.num_steps >= 50
    assert llm.llm_engine.request_info("nobody") is None


def test_a_request_can_be_looked_up_while_it_runs(checkpoint):
    llm = LLM(model=checkpoint, dtype="float32", num_kv_blocks=20, max_num_seqs=1)
    engine = llm.llm_engine
    for request_id in ("first", "second"):
        engine.add_request(request_id, [7] * 20, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    first, second = engine.request_info("first"), engine.request_info("second")
    assert (first.status, first.usage.num_output_tokens, first.timeline.num_steps) == ("running", 2, 2)
    assert (second.status, second.timeline.queued_s, second.timeline.num_steps) == ("waiting", None, 0)
    engine.abort_request(["first", "second"])
    assert engine.request_info("second").finish_reason is FinishReason.ABORT


def test_memory_of_the_ended_is_bounded_in_number_and_time():
    now = [0.0]
    watch = RequestWatch(None, lambda: now[0])
    for index in range(MAX_KEPT_REQUESTS + 10):
        now[0] = index * MAX_KEPT_S / (2 * MAX_KEPT_REQUESTS)
        request_id = str(index)
        watch.arrived(Request(request_id, (1,), SamplingParams(), now[0], 1, 0), Timeline())
        watch.ended(RequestOutput(request_id, None, (1,), finished=True, usage=Usage(1, 1)), FinishReason.STOP)
    assert watch.info("9", "finished") is None
    assert watch.info("10", "finished") is not None
    latest = str(MAX_KEPT_REQUESTS + 9)
    now[0] += MAX_KEPT_S + 1
    assert watch.info(latest, "finished") is None
