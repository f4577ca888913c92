"""How old blocks become, on a clock of the test's own; and how a step's time is split into its parts."""

from __future__ import annotations

import pytest
import torch

from pagestream.engine.block_ages import EVERY, BlockAges
from pagestream.engine.core.block_pool import BlockPool
from pagestream.engine.runner import forward_timer
from pagestream.engine.runner.forward_timer import ForwardTimer
from pagestream.engine.watch import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_cached_blocks_life_idleness_and_reuse():
    clock = Clock()
    pool = BlockPool(1)
    pool.observer = ages = BlockAges(1, clock)
    block = pool.allocate()
    pool.publish(block, b"prefix")
    clock.now_s = 103.0
    pool.release(block)
    clock.now_s = 108.0
    pool.share(block)  # found again by its hash, after five seconds
    pool.share(block)  # by somebody else while it is held: no gap
    news = ages.news()
    assert (news.lifetime_s, news.idle_s, news.reuse_gap_s) == ([], [], [5.0])
    pool.release(block)
    clock.now_s = 110.0
    pool.release(block)
    clock.now_s = 117.0
    assert pool.allocate() is block
    news = ages.news()
    assert (news.lifetime_s, news.idle_s, news.reuse_gap_s) == ([17.0], [7.0], [])
    pool.release(block)  # of unknown content: nothing is lost when it is given away
    clock.now_s = 120.0
    pool.allocate()
    assert ages.news().lifetime_s == []


def test_one_block_in_so_many_is_followed():
    clock = Clock()
    pool = BlockPool(3 * EVERY)
    pool.observer = ages = BlockAges(pool.num_blocks, clock)
    for round_number in range(2):
        held = [pool.allocate() for _ in range(pool.num_blocks)]
        for block in held:
            pool.publish(block, b"%d %d" % (round_number, block.block_id))
        clock.now_s += 1.0
        for block in held:
            pool.release(block)
    assert ages.news().lifetime_s == [1.0] * 3


def test_the_parts_of_a_step_are_its_whole_time():
    clock = Clock()
    times = StepTimes(clock)
    for mark in (times.scheduled, lambda: times.executed(3.0), times.judged, times.committed):
        clock.now_s += 4.0
        mark()
    assert (times.schedule_s, times.forward_s, times.sample_s, times.detokenize_s) == (8.0, 3.0, 1.0, 4.0)


@pytest.mark.parametrize(("told_s", "forward_s", "sample_s"), [(0.0, 4.0, 0.0), (9.0, 4.0, 0.0), (1.0, 1.0, 3.0)])
def test_an_executor_may_tell_nothing_and_never_more_than_there_was(told_s: float, forward_s: float, sample_s: float):
    clock = Clock()
    times = StepTimes(clock)
    clock.now_s += 4.0
    times.executed(told_s)
    assert (times.forward_s, times.sample_s) == (forward_s, sample_s)


@pytest.mark.parametrize(("is_reached", "expected_s"), [(True, 0.012), (False, None)])
def test_on_a_gpu_the_devices_own_marks_are_read_and_nobody_waits(monkeypatch: pytest.MonkeyPatch, is_reached: bool, expected_s: float | None):
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            return is_reached

        def elapsed_time(self, other: Event) -> float:
            return 12.0  # milliseconds

        def synchronize(self) -> None:
            raise AssertionError("nobody may wait for a mark")

    monkeypatch.setattr(forward_timer.torch.cuda, "Event", Event)
    timer = ForwardTimer(torch.device("cuda"))
    timer.stop()
    told_s = timer.seconds()
    assert calls == ["record", "record"]
    assert told_s == expected_s if expected_s is not None else 0 <= told_s < 0.012
