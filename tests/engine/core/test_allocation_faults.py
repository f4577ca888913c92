"""The pool fails at its n-th taking, for every n: nothing leaks, and nobody's tokens change."""

import pytest

from pagestream.engine.core.config import PreemptionMode, SchedulerLimits
from pagestream.engine.core.scheduler import Scheduler
from tests.engine.core.fake_run import BLOCK_SIZE, FailingManager, FakeRun, make_request, solo_answers

NUM_BLOCKS = 16
NUM_SWAP_BLOCKS = 12


def scripted_requests():
    return [
        make_request("long", [1, 2, 3] * 6, 20),
        make_request("forked", [4, 5] * 5, 9, n=3),
        make_request("short", [6], 12),
        make_request("same head", [1, 2, 3] * 5, 10),
        make_request("prompt only", [7] * 9, 0),
        make_request("forked again", [4, 5] * 5, 6, n=2),
        make_request("beams", [4, 5, 6] * 3, 7, n=3, beams=True),
    ]


def run_script(mode: PreemptionMode, fail_at: int) -> FailingManager:
    manager = FailingManager(NUM_BLOCKS, BLOCK_SIZE, num_swap_blocks=NUM_SWAP_BLOCKS, fail_at=fail_at)
    scheduler = Scheduler(SchedulerLimits(8, 12, preemption_mode=mode), manager)
    run = FakeRun(scheduler)
    for request in scripted_requests():
        run.add(request)
        run.step()
    run.run()
    for request in scripted_requests():
        assert run.answers(request.request_id) == solo_answers(request), f"{request.request_id}, failing at {fail_at}"
    manager.check()
    assert manager.device.num_free == NUM_BLOCKS
    assert manager.host.num_free == NUM_SWAP_BLOCKS
    return manager


@pytest.mark.parametrize("mode", PreemptionMode)
def test_the_pool_failing_at_its_nth_taking_harms_nobody(mode):
    num_taken = run_script(mode, fail_at=0).num_taken_blocks
    assert num_taken > 30
    for fail_at in range(1, num_taken + 1):
        run_script(mode, fail_at)
