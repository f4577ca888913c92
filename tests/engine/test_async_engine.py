"""The async door: streams over one loop, readers that leave or dawdle, the queue, the drain, and the end."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from dataclasses import replace

import pytest

from pagestream.engine import (
    AsyncLLMEngine,
    EngineArgs,
    EngineDead,
    Fault,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    SamplingParams,
    fold,
)
from pagestream.engine.factory import build_engine

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@contextlib.asynccontextmanager
async def running(tiny_llama, **options):
    args = EngineArgs(**{"model": str(tiny_llama), "num_kv_blocks": 128, "enable_fault_injection": True, **options})
    engine = AsyncLLMEngine.from_engine_args(args)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def whole(stream):
    return fold([output async for output in stream]).outputs[0].token_ids


async def lose_the_device(engine, stream):
    """With a second request, so that there is nobody to blame; the first one's stream is told."""

    def broken(plan):
        raise RuntimeError("the device is lost")

    engine._engine.executor.execute = broken
    engine._engine.add_request("second", "the lazy", LONG)
    with pytest.raises(EngineDead):
        async for _ in stream:
            pass


async def until_idle(engine):
    while engine._engine.has_unfinished_requests() or engine._added or engine._aborted:
        await asyncio.sleep(0.005)
    engine._engine.scheduler.blocks.check()
    assert engine.stats().num_used_blocks == 0


async def test_streams_side_by_side_are_what_they_are_alone(tiny_llama):
    async with running(tiny_llama) as engine:
        prompts = [f"prompt number {index}" for index in range(8)]
        alone = [await whole((await engine.add_requests(f"solo{i}", [prompt], GREEDY))[0]) for i, prompt in enumerate(prompts)]
        streams = await engine.add_requests("all", prompts, GREEDY)
        assert await asyncio.gather(*(whole(stream) for stream in streams)) == alone
        await until_idle(engine)


@pytest.mark.parametrize("after", [0, 1, 2, 5, 23])
async def test_a_reader_that_leaves_after_any_chunk_frees_everything(tiny_llama, after):
    async with running(tiny_llama) as engine:
        neighbour = (await engine.add_requests("neighbour", ["the quick"], GREEDY))[0]
        generating = engine.generate("the lazy dog", LONG, "leaver")
        count = 0
        if after:
            async for _ in generating:
                count += 1
                if count == after:
                    break
        await generating.aclose()
        told = await whole(neighbour)
        await until_idle(engine)
        assert told == await whole((await engine.add_requests("again", ["the quick"], GREEDY))[0])


@pytest.mark.parametrize("num_turns", range(8))
async def test_who_leaves_in_the_moment_that_the_prompt_is_ready_has_no_request(tiny_llama, num_turns):
    class Once:
        """Makes a request on the loop's own thread, when told to."""

        def submit(self, work):
            self.done, self.work = concurrent.futures.Future(), work
            return self.done

    async with running(tiny_llama) as engine:
        engine._text_threads.shutdown()
        engine._text_threads = once = Once()
        once.shutdown = lambda **_: None
        adding = asyncio.create_task(engine.add_requests("leaver", ["the quick"], LONG, timeout_s=60))
        await asyncio.sleep(0)
        once.done.set_result(once.work())
        for _ in range(num_turns):  # of the loop, until the task has had its news
            await asyncio.sleep(0)
        if adding.cancel():
            with pytest.raises(asyncio.CancelledError):
                await adding
            assert not engine._engine.has_unfinished_requests()
            assert not engine._added
            assert not len(engine._streams)
        else:
            (await adding)[0].abort()
            await until_idle(engine)


async def test_a_slow_reader_finds_one_merged_delta_and_slows_nobody(tiny_llama):
    async with running(tiny_llama) as engine:
        slow, quick = await engine.add_requests("both", ["the same prompt", "the same prompt"], GREEDY)
        expected = await whole(quick)
        await until_idle(engine)
        outputs = [output async for output in slow]
        assert len(outputs) == 1
        assert outputs[0].outputs[0].token_ids == expected


async def test_a_reader_in_no_hurry_is_woken_by_several_deltas(tiny_llama):
    async with running(tiny_llama) as engine:
        expected = await whole((await engine.add_requests("each", ["the quick"], GREEDY))[0])
        (stream,) = await engine.add_requests("several", ["the quick"], GREEDY)
        stream.keep_deltas(8)
        first = await anext(stream)
        assert stream.usage.num_output_tokens >= 8
        outputs = [first] + [output async for output in stream]
        assert len(outputs) >= len(expected) == 24
        assert fold(outputs).outputs[0].token_ids == expected


@pytest.mark.parametrize("options", [{"timeout_s": 0.2}, {"fault": Fault("raise", at_token=3)}], ids=["deadline", "fault"])
async def test_a_reader_in_no_hurry_is_told_every_end(tiny_llama, options):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("hurried", ["the quick"], replace(LONG, max_tokens=480), **options)
        stream.keep_deltas(10_000)
        outputs = []
        with contextlib.suppress(RequestFailed):
            async for output in stream:
                outputs.append(output)
        assert stream.is_finished
        assert stream.usage.num_output_tokens == sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        await until_idle(engine)


async def test_a_short_prompt_that_comes_later_is_answered_before_a_long_one(tiny_llama):
    async with running(tiny_llama, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        (long,) = await engine.add_requests("long", [[7] * 480], SamplingParams(max_tokens=4))
        while engine.stats().num_running == 0:
            await asyncio.sleep(0.001)
        (short,) = await engine.add_requests("short", ["the"], SamplingParams(max_tokens=4))
        first = {asyncio.create_task(anext(stream)): name for name, stream in (("long", long), ("short", short))}
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        assert [first[task] for task in done] == ["short"]
        await asyncio.gather(*first)


async def test_all_prompts_are_admitted_or_none(tiny_llama):
    async with running(tiny_llama) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.add_requests("some", ["good", ""], GREEDY)
        assert refused.value.param == "prompt"
        await until_idle(engine)


async def test_the_queue_is_bounded_and_says_when_to_come_back(tiny_llama):
    async with running(tiny_llama, max_num_seqs=2, max_num_queued_reqs=4) as engine:
        added = await asyncio.gather(
            *(engine.add_requests(str(index), [f"prompt {index}"], LONG) for index in range(20)), return_exceptions=True
        )
        accepted = [streams[0] for streams in added if isinstance(streams, list)]
        refused = [error for error in added if isinstance(error, Overloaded)]
        assert len(accepted) == 6
        assert len(refused) == 14
        assert all(error.retry_after_s > 0 for error in refused)
        assert all(len(tokens) == 300 for tokens in await asyncio.gather(*(whole(stream) for stream in accepted)))
        await until_idle(engine)


@pytest.mark.parametrize("n", [1, 2])
async def test_what_the_queue_can_never_hold_is_no_reason_to_come_back(tiny_llama, n):
    async with running(tiny_llama, max_num_seqs=2, max_num_queued_reqs=4) as engine:
        params, most = replace(GREEDY, n=n, max_tokens=2), 2 // n + 4
        with pytest.raises(InvalidRequest, match=f"at most {most} of these") as refused:
            await engine.add_requests("many", ["the"] * (most + 1), params, param=[f"input[{at}]" for at in range(most + 1)])
        assert refused.value.param == "input"
        await asyncio.gather(*(whole(stream) for stream in await engine.add_requests("most", ["the"] * most, params)))
        await until_idle(engine)


async def test_a_fault_ends_one_stream_after_what_it_had(tiny_llama):
    async with running(tiny_llama) as engine:
        (marked,) = await engine.add_requests("marked", ["the"], GREEDY, fault=Fault("raise", at_token=5))
        (other,) = await engine.add_requests("other", ["the"], GREEDY)
        received: list[int] = []

        async def read() -> None:
            async for output in marked:
                received.extend(token_id for answer in output.outputs for token_id in answer.token_ids)

        with pytest.raises(RequestFailed, match="injected"):
            await read()
        assert tuple(received) == (await whole(other))[:5]
        assert not engine.is_dead


async def test_draining_refuses_new_work_and_lets_running_streams_end(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("runs", ["the"], LONG)
        await anext(stream)
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(Overloaded) as refused:
            await engine.add_requests("late", ["the"], GREEDY)
        assert refused.value.draining
        rest = fold([output async for output in stream])
        assert rest.finished
        assert await draining


async def test_the_end_of_the_loop_ends_every_stream(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("runs", ["the"], LONG)
        await anext(stream)
        await lose_the_device(engine, stream)
        assert engine.is_dead
        with pytest.raises(EngineDead):
            await engine.add_requests("late", ["the"], GREEDY)


async def test_a_full_queue_is_known_before_a_request_is_and_a_dead_engine_has_none(tiny_llama):
    async with running(tiny_llama, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        engine.refuse_while_full()
        (stream,) = await engine.add_requests("runs", ["the"], LONG)
        await anext(stream)
        await engine.add_requests("waits", ["the"], LONG)
        with pytest.raises(Overloaded):
            engine.refuse_while_full()
        await lose_the_device(engine, stream)
        engine.refuse_while_full()


async def test_steps_leave_the_event_loop_free(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("slow", ["the"], GREEDY, fault=Fault("slow", at_token=2, seconds=2.0))
        longest = 0.0
        reading = asyncio.create_task(whole(stream))
        loop = asyncio.get_running_loop()
        while not reading.done():
            before = loop.time()
            await asyncio.sleep(0.005)
            longest = max(longest, loop.time() - before)
        assert longest < 1


async def test_steps_go_on_without_the_event_loop_but_no_further_than_one_ahead(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("r", ["so"], LONG)
        first = await anext(stream)
        step, num_steps = engine._engine.step, 0

        def counted():
            nonlocal num_steps
            num_steps += 1
            return step()

        engine._engine.step = counted
        while not engine._is_one_ahead:
            await asyncio.sleep(0)
        num_before = num_steps
        time.sleep(0.3)  # the loop is held up, for as long as hundreds of steps take
        assert num_before <= num_steps <= num_before + 2
        rest = [output async for output in stream]
        assert sum(len(output.outputs[0].token_ids) for output in (first, *rest)) == 300
        assert num_steps > 100


async def test_a_request_can_be_looked_up_by_its_id_until_some_time_after_its_end(tiny_llama):
    async with running(tiny_llama) as engine:
        streams = await engine.add_requests("pair", ["the", "a"], GREEDY, include_timeline=True)
        first = await anext(streams[0])
        assert first.timeline is None
        assert [info.status for info in engine.request_info("pair")] == ["running", "running"]
        last = [fold([output async for output in stream]) for stream in streams]
        infos = engine.request_info("pair")
        assert [info.timeline for info in infos] == [output.timeline for output in last]
        assert all(info.timeline.num_steps >= 24 for info in infos)
        assert engine.request_info("nobody") == []


async def test_an_id_is_refused_while_anything_that_was_added_under_it_goes_on(tiny_llama):
    async with running(tiny_llama) as engine:
        both = await asyncio.gather(
            *(engine.add_requests("same", ["the quick"], LONG) for _ in range(2)), return_exceptions=True
        )
        (streams,) = [added for added in both if isinstance(added, list)]
        (refused,) = [error for error in both if isinstance(error, InvalidRequest)]
        assert refused.param == "request_id"
        assert len(await whole(streams[0])) == 300
        short, long = await engine.add_requests("pair", [[7] * 400, [7] * 9], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        assert len(await whole(short)) == 112
        with pytest.raises(InvalidRequest):
            await engine.add_requests("pair", ["the", "a"], GREEDY)
        assert len(await whole(long)) == 503
        await until_idle(engine)


async def test_who_reads_on_after_an_abort_finds_the_end(tiny_llama):
    async with running(tiny_llama) as engine:
        (stream,) = await engine.add_requests("aborted", ["the"], LONG, fault=Fault("slow", at_token=1, seconds=0.2))
        await anext(stream)
        waiting = asyncio.create_task(whole_or_nothing(stream))
        await asyncio.sleep(0.01)
        stream.abort()
        assert await asyncio.wait_for(waiting, 60) == []
        await until_idle(engine)


async def whole_or_nothing(stream):
    return [output async for output in stream]


async def test_hours_without_work_say_nothing_of_the_pace(tiny_llama, monkeypatch):
    async with running(tiny_llama, max_num_seqs=1) as engine:
        for index in range(8):
            await whole((await engine.add_requests(f"pace{index}", ["the"], GREEDY))[0])
        await until_idle(engine)
        monotonic = time.monotonic
        monkeypatch.setattr("pagestream.engine.admission.time.monotonic", lambda: monotonic() + 5 * 3600)
        streams = await engine.add_requests("queue", ["the"] * 4, GREEDY)
        (patient,) = await engine.add_requests("patient", ["a"], GREEDY, timeout_s=600)
        assert [len(await whole(stream)) for stream in [*streams, patient]] == [24] * 5


async def test_populating_the_cache_ends_with_the_engine(tiny_llama):
    def populate(is_unwanted):
        while not is_unwanted():
            time.sleep(0.001)

    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=16)
    engine = AsyncLLMEngine(replace(build_engine(args.to_config()), populate_cache=populate))
    await engine.start()
    engine.populate_cache()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pagestream-populate"]
    assert not thread.daemon, "the interpreter's end would tear it out of torch's code and abort the process"
    await engine.stop()
    thread.join(60)
    assert not thread.is_alive()
