"""Deadlines: in the queue, in the prompt, in the answer, and the refusal of what is hopeless."""

import asyncio
import time

import pytest

from pagestream.engine import DeadlineExceeded, Fault, FinishReason, Overloaded, SamplingParams, fold
from pagestream.engine.open_streams import DEADLINE_GRACE_S
from tests.engine.test_async_engine import GREEDY, LONG, running, until_idle, whole


async def folded(stream):
    return fold([output async for output in stream])


async def test_an_answer_ends_at_its_deadline_with_the_tokens_it_has(tiny_llama):
    async with running(tiny_llama) as engine:
        expected = await whole((await engine.add_requests("alone", ["the"], LONG))[0])
        (stream,) = await engine.add_requests("late", ["the"], LONG, timeout_s=1.0, fault=Fault("slow", at_token=7, seconds=1.5))
        output = await folded(stream)
        (answer,) = output.outputs
        assert answer.finish_reason is FinishReason.DEADLINE
        assert output.finished
        assert 7 <= len(answer.token_ids) <= 8
        assert answer.token_ids == expected[: len(answer.token_ids)]
        await until_idle(engine)


async def test_a_prompt_that_is_not_computed_in_time_ends_without_tokens(tiny_llama):
    async with running(tiny_llama, max_num_batched_tokens=16, max_num_seqs=2) as engine:
        (slow,) = await engine.add_requests("slow", ["the"], GREEDY, fault=Fault("slow", at_token=1, seconds=1.0))
        await anext(slow)
        (stream,) = await engine.add_requests("late", [[7] * 400], GREEDY, timeout_s=0.5)
        output = await folded(stream)
        assert output.outputs[0].finish_reason is FinishReason.DEADLINE
        assert output.usage.num_output_tokens == 0
        assert len(await whole(slow)) == 23
        await until_idle(engine)


async def test_a_request_may_reach_its_deadline_in_the_queue(tiny_llama):
    async with running(tiny_llama, max_num_seqs=1) as engine:
        (first,) = await engine.add_requests("first", ["the"], GREEDY, fault=Fault("slow", at_token=1, seconds=1.0))
        (queued,) = await engine.add_requests("queued", ["a"], GREEDY, timeout_s=0.5)
        output = await folded(queued)
        assert output.outputs[0].finish_reason is FinishReason.DEADLINE
        assert len(await whole(first)) == 24
        await until_idle(engine)


async def test_one_that_ends_before_its_deadline_leaves_no_timer(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("quick", ["the"], GREEDY, timeout_s=60)
        assert len(await whole(stream)) == 24
        await until_idle(engine)
        assert not engine._streams.num_deadlines


async def test_what_would_still_wait_at_its_deadline_is_refused_at_once(tiny_llama):
    async with running(tiny_llama, max_num_seqs=1) as engine:
        for index in range(8):
            fault = Fault("slow", at_token=0, seconds=0.05)
            await whole((await engine.add_requests(f"pace{index}", ["the"], SamplingParams(max_tokens=1), fault=fault))[0])
        streams = await engine.add_requests("queue", ["the"] * 40, LONG)
        before_s = time.monotonic()
        with pytest.raises(Overloaded, match="timeout_s") as refused:
            await engine.add_requests("hopeless", ["a"], GREEDY, timeout_s=1.0)
        assert time.monotonic() - before_s < 0.5
        assert refused.value.retry_after_s > 0
        (patient,) = await engine.add_requests("patient", ["a"], GREEDY, timeout_s=60)
        for stream in [*streams, patient]:
            stream.abort()
        await until_idle(engine)


async def test_time_spent_on_the_way_in_counts(tiny_llama):
    async with running(tiny_llama) as engine:
        encode = engine.tokenizer.encode

        def slowly(*arguments):
            time.sleep(0.1)
            return encode(*arguments)

        engine._engine.intake.tokenizer = type("Slow", (), {"encode": staticmethod(slowly)})()
        with pytest.raises(DeadlineExceeded):
            await engine.add_requests("late", ["the"], GREEDY, timeout_s=0.05)
        await asyncio.sleep(0)
        await until_idle(engine)


@pytest.mark.parametrize("kind", ["slow", "hang"])
async def test_nobody_waits_for_a_stuck_step_beyond_his_deadline(tiny_llama, kind):
    stuck_s, timeout_s = 4.0, 1.0
    async with running(tiny_llama, max_num_seqs=6) as engine:
        (alone,) = await engine.add_requests("alone", ["a"], GREEDY)
        undisturbed = await whole(alone)
        told = {}

        def note(outputs):
            for output in outputs:
                told.setdefault(output.request_id, []).append(output)

        engine.on_outputs = note
        (neighbour,) = await engine.add_requests("neighbour", ["a"], GREEDY)
        begun_s = time.monotonic()
        fault = Fault(kind, at_token=3, seconds=stuck_s)
        (guilty,) = await engine.add_requests("guilty", ["the"], LONG, timeout_s=timeout_s, fault=fault)
        both = SamplingParams(temperature=1, seed=2, n=2, max_tokens=300, ignore_eos=True)
        (other,) = await engine.add_requests("other", [[9] * 20], both, timeout_s=timeout_s)
        (queued,) = await engine.add_requests("queued", ["the"], both, timeout_s=timeout_s)
        (behind,) = await engine.add_requests("behind", ["the"], both, timeout_s=timeout_s)
        ended = await asyncio.gather(*map(folded, (guilty, other, queued, behind)))
        assert time.monotonic() - begun_s < timeout_s + DEADLINE_GRACE_S + 2 < stuck_s
        assert engine.stalled_s > 0, "the step goes on"
        for output in ended:
            assert all(answer.finish_reason is FinishReason.DEADLINE for answer in output.outputs)
            assert output.finished
            assert output.usage.num_output_tokens == sum(len(answer.token_ids) for answer in output.outputs)
        assert [len(output.outputs) for output in ended] == [1, 2, 2, 2]
        assert len(ended[0].outputs[0].token_ids) == 3
        assert await whole(neighbour) == undisturbed
        assert time.monotonic() - begun_s > stuck_s
        await until_idle(engine)
        assert not engine._streams
        for output in ended:  # whoever keeps a record has heard what the reader has
            assert fold(told[output.request_id]).outputs == output.outputs
            assert sum(each.finished for each in told[output.request_id]) == 1


async def test_a_prompt_is_not_tokenized_beyond_its_deadline(tiny_llama):
    async with running(tiny_llama) as engine:
        tokenizer = engine._engine.intake.tokenizer
        engine._engine.intake.tokenizer = type("Slow", (), {"encode": staticmethod(lambda *_: time.sleep(3.0))})()
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await engine.add_requests("late", ["the"], GREEDY, timeout_s=0.1)
        assert time.monotonic() - begun_s < 2
        engine._engine.intake.tokenizer = tokenizer
        await until_idle(engine)
