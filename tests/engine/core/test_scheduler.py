"""The scheduler against a model that is a function: everybody gets his solo answer, whatever the pool and the company."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import PreemptionMode, SchedulerLimits, SchedulingPolicy
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.preemption import MAX_PREEMPTIONS_BEFORE_SPARED, PreemptionCosts
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.stopping import most_blocks, most_tokens
from tests.engine.core.fake_run import BLOCK_SIZE, FakeRun, make_request, make_scheduler, solo_answers


@st.composite
def loads(draw):
    num_blocks = draw(st.integers(6, 24))
    requests = []
    for index in range(draw(st.integers(1, 10))):
        n = draw(st.sampled_from([1, 1, 1, 2, 3]))
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=20))
        most = most_tokens(len(prompt), n, BLOCK_SIZE, num_blocks)
        if most_blocks(len(prompt), 0, n, BLOCK_SIZE) > num_blocks:
            continue
        max_tokens = draw(st.integers(0, max(0, min(most, 30))))
        beams = n > 1 and draw(st.booleans())
        requests.append(make_request(str(index), prompt, max_tokens, n=n, beams=beams, salt=draw(st.sampled_from(["", "x"]))))
    return num_blocks, requests


@given(
    load=loads(),
    swap=st.sampled_from([0, 5, 40]),
    mode=st.sampled_from(list(PreemptionMode)),
    budget=st.sampled_from([8, 16, 64]),
    cache=st.booleans(),
    arrivals=st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_everybody_gets_his_solo_answer(load, swap, mode, budget, cache, arrivals):
    num_blocks, requests = load
    scheduler = make_scheduler(num_blocks, swap=swap, budget=budget, mode=mode, cache=cache)
    run = FakeRun(scheduler)
    for request in requests:
        run.add(request)
        for _ in range(arrivals.randrange(4)):
            if scheduler.num_unfinished:
                run.step()
    run.run()
    for request in requests:
        assert run.answers(request.request_id) == solo_answers(request)
    assert scheduler.blocks.device.num_free == num_blocks
    assert scheduler.blocks.host.num_free == swap


@given(load=loads(), mode=st.sampled_from(list(PreemptionMode)), rng=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_leaving_at_any_moment_frees_everything_and_disturbs_nobody(load, mode, rng):
    num_blocks, requests = load
    scheduler = make_scheduler(num_blocks, swap=10, mode=mode)
    run = FakeRun(scheduler)
    for request in requests:
        run.add(request)
    gone = set()
    while scheduler.num_unfinished:
        run.step()
        if rng.random() < 0.2 and requests:
            chosen = rng.choice(requests).request_id
            if scheduler.finish(chosen, FinishReason.ABORT):
                gone.add(chosen)
            scheduler.blocks.check()
    for request in requests:
        if request.request_id not in gone:
            assert run.answers(request.request_id) == solo_answers(request)
    assert scheduler.blocks.device.num_free == num_blocks


def crowded(num_requests=12, num_blocks=14, **options):
    scheduler = make_scheduler(num_blocks, **options)
    run = FakeRun(scheduler)
    requests = [make_request(str(i), [1 + i % 3] * (1 + i % 7), 30) for i in range(num_requests)]
    for request in requests:
        run.add(request)
    return run, requests


@pytest.mark.parametrize("mode", PreemptionMode)
def test_nobody_gives_way_without_bound(mode):
    """The bound of PreemptionPolicy.victim: once spared, a group goes only when those in front of it all need its place.

    Those in front take at most their own blocks, one at a time, so they can drive it out no more often than that.
    """
    run, requests = crowded(swap=30, mode=mode)
    most: dict[str, int] = {}
    while run.scheduler.num_unfinished:
        run.step()
        for queue in (run.scheduler.running, run.scheduler.waiting, run.scheduler.swapped):
            for group in queue:
                most[group.request.request_id] = group.timeline.num_preemptions
    assert max(most.values()) > 0, "nobody had to give way: the test shows nothing"
    for index, request in enumerate(requests):
        in_front = sum(most_blocks(len(other.prompt_token_ids), other.max_tokens, 1, BLOCK_SIZE) for other in requests[:index])
        assert most.get(request.request_id, 0) <= MAX_PREEMPTIONS_BEFORE_SPARED + in_front


@pytest.mark.parametrize("mode", PreemptionMode)
def test_the_oldest_moves_in_every_step(mode):
    run, _ = crowded(swap=30, mode=mode)
    while run.scheduler.num_unfinished:
        before = run.scheduler.running[:1]
        num_preemptions = [group.timeline.num_preemptions for group in before]
        state = [(sequence.seq_id, sequence.num_computed_tokens) for group in before for sequence in group.unfinished]
        run.step()
        assert [group.timeline.num_preemptions for group in before] == num_preemptions
        for group in before:
            if group.unfinished:
                assert [(one.seq_id, one.num_computed_tokens) for one in group.unfinished] != state


@pytest.mark.parametrize("mode", PreemptionMode)
def test_who_has_become_the_oldest_while_he_was_out_is_back_at_once(mode):
    """Never the first in line when he had to give way, he may be when those before him have ended."""
    num_still = num_steps = 0
    for num_blocks in range(13, 30):
        run, _ = crowded(num_blocks=num_blocks, swap=30, mode=mode)
        scheduler, num_still_now = run.scheduler, 0
        while scheduler.num_unfinished:
            oldest = min((*scheduler.running, *scheduler.waiting, *scheduler.swapped), key=lambda group: group.order)
            before = [(one.seq_id, one.num_computed_tokens) for one in oldest.unfinished]
            run.step()
            num_still_now = num_still_now + 1 if [(one.seq_id, one.num_computed_tokens) for one in oldest.unfinished] == before else 0
            assert num_still_now <= 1
            num_still += num_still_now
        num_steps += run.num_steps
    assert num_still <= num_steps / 100


@pytest.mark.parametrize("order", [["small", "large"], ["large", "small"]], ids=" ".join)
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_the_one_whose_loss_costs_least_gives_way(mode, order):
    scheduler = make_scheduler(15, swap=30, mode=mode, cache=False, budget=64)
    run = FakeRun(scheduler)
    prompts = {"first": [1] * 12, "small": [2] * 4, "large": [3] * 24}
    for request_id in ("first", *order):
        run.add(make_request(request_id, prompts[request_id], 24))
    groups = {request_id: scheduler.group(request_id) for request_id in prompts}
    while not any(group.timeline.num_preemptions for group in groups.values()):
        run.step()
    assert [request_id for request_id, group in groups.items() if group.timeline.num_preemptions] == ["small"]
    run.run()


@pytest.mark.parametrize(("copy_s", "is_swapped"), [(0.001, True), (0.999, True), (2.001, False), (50.0, False)])
def test_auto_takes_the_way_that_costs_less(copy_s, is_swapped):
    """Both ways of a block against its tokens at most, of which a table has up to BLOCK_SIZE - 1 fewer than room for."""
    costs = PreemptionCosts(recompute_s_per_token=1.0, copy_s_per_block=copy_s)
    scheduler = Scheduler(SchedulerLimits(8, 64), BlockManager(14, BLOCK_SIZE, num_swap_blocks=40), costs)
    run = FakeRun(scheduler)
    for number in range(6):
        run.add(make_request(str(number), [number] * (BLOCK_SIZE * 2 - 1), 20))
    run.run()
    counters = scheduler.counters
    assert (counters.num_preempted_swap > 0, counters.num_preempted_recompute > 0) == (is_swapped, not is_swapped)


def test_lowest_priority_gives_way_first():
    scheduler = make_scheduler(8, policy=SchedulingPolicy.PRIORITY, mode=PreemptionMode.RECOMPUTE, cache=False)
    run = FakeRun(scheduler)
    requests = [make_request(str(i), [1, 2], 14, priority=priority) for i, priority in enumerate((0, 9, 1))]
    for request in requests:
        run.add(request)
    groups = [scheduler.group(str(i)) for i in range(3)]
    run.run()
    assert [group.timeline.num_preemptions > 0 for group in groups] == [False, True, False]


def test_a_lower_number_is_admitted_first():
    scheduler = make_scheduler(40, policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    run = FakeRun(scheduler)
    for request_id, priority in (("late", 5), ("early", -1), ("middle", 2)):
        run.add(make_request(request_id, [1], 2, priority=priority))
    order = []
    while scheduler.num_unfinished:
        run.step()
        order += [group.request.request_id for group in scheduler.running if group.request.request_id not in order]
    assert order == ["early", "middle", "late"]


def test_swapped_groups_come_back_before_new_ones_are_admitted():
    run, _ = crowded(swap=60, mode=PreemptionMode.SWAP)
    saw_swapped = False
    while run.scheduler.num_unfinished:
        waiting = {group.request.request_id for group in run.scheduler.waiting}
        swapped_before = bool(run.scheduler.swapped)
        run.step()
        if swapped_before and run.scheduler.swapped:
            saw_swapped = True
            admitted = waiting - {group.request.request_id for group in run.scheduler.waiting}
            assert not admitted
    assert saw_swapped


def test_groups_that_share_blocks_keep_sharing_through_both_ways():
    for mode, swap in ((PreemptionMode.SWAP, 40), (PreemptionMode.RECOMPUTE, 0)):
        scheduler = make_scheduler(19, swap=swap, mode=mode, cache=False, budget=64)
        run = FakeRun(scheduler)
        first = make_request("first", [1] * 30, 28)
        shared = make_request("shared", [2] * 24, 8, n=3)
        assert most_blocks(24, 8, 3, BLOCK_SIZE) == 6 + 3 * 2
        run.add(first)
        run.add(shared)
        group = scheduler.group("shared")
        peak = 0
        while scheduler.num_unfinished:
            run.step()
            peak = max(peak, scheduler.blocks.num_distinct(group.unfinished))
        assert group.timeline.num_preemptions > 0
        assert peak <= most_blocks(24, 8, 3, BLOCK_SIZE)
        assert run.answers("shared") == solo_answers(shared)
        assert run.answers("first") == solo_answers(first)


def test_forks_share_their_prompt():
    separate = make_scheduler(400, max_num_seqs=8, budget=1024, cache=False)
    run = FakeRun(separate)
    for index in range(8):
        run.add(make_request(str(index), [1] * 128, 4))
    run.step()
    num_separate = separate.blocks.device.num_blocks - separate.blocks.device.num_free
    together = make_scheduler(400, max_num_seqs=8, budget=1024, cache=False)
    run = FakeRun(together)
    run.add(make_request("all", [1] * 128, 4, n=8))
    run.step()
    run.step()
    num_together = together.blocks.device.num_blocks - together.blocks.device.num_free
    assert num_together <= num_separate / 4
    assert together.counters.num_copied_blocks == 0  # the prompt ends with a block, so nobody writes into a shared one


@pytest.mark.parametrize("mode", PreemptionMode)
def test_beams_that_give_way_go_on_as_if_they_had_not(mode):
    scheduler = make_scheduler(19, swap=40, mode=mode, cache=False, budget=64)
    run = FakeRun(scheduler)
    first = make_request("first", [1] * 30, 28)
    beams = make_request("beams", [2] * 22, 14, n=3, beams=True)
    run.add(first)
    run.add(beams)
    group = scheduler.group("beams")
    peak = 0
    while scheduler.num_unfinished:
        run.step()
        assert group.num_live_sequences == 3 or not group.num_live_sequences
        assert len(group.sequences) <= 3
        peak = max(peak, scheduler.blocks.num_distinct(group.unfinished))
    assert group.timeline.num_preemptions > 0
    assert peak <= most_blocks(22, 14, 3, BLOCK_SIZE)
    assert run.answers("beams") == solo_answers(beams)
    assert len(run.answers("beams")) == 3
    assert run.answers("first") == solo_answers(first)
    assert scheduler.counters.num_copied_blocks > 0


def test_beams_alone_never_need_more_than_their_bound():
    for prompt, width in ((3, 2), (4, 3), (17, 4), (21, 5)):
        num_blocks = most_blocks(prompt, 16, width, BLOCK_SIZE)
        scheduler = make_scheduler(num_blocks, cache=False, budget=16)
        run = FakeRun(scheduler)
        request = make_request("beams", [7] * prompt, 16, n=width, beams=True)
        run.add(request)
        run.run()
        assert run.answers("beams") == solo_answers(request)
        assert scheduler.counters.num_preempted_recompute == 0
        assert scheduler.blocks.device.num_free == num_blocks


def test_plans_are_the_same_bytes_at_every_run():
    import pickle

    def plans():
        run, _ = crowded(swap=20)
        run.run()
        return pickle.dumps([repr(plan) for plan in run.plans])

    assert plans() == plans()


def test_a_wait_is_bounded_by_those_in_front():
    """First come, first served: who is in front of a waiting request never changes, so it waits for their work at most."""
    run, requests = crowded(num_requests=20, num_blocks=20)
    started = {}
    while run.scheduler.num_unfinished:
        waiting = {group.request.request_id for group in run.scheduler.waiting}
        run.step()
        for request_id in waiting - {group.request.request_id for group in run.scheduler.waiting}:
            started.setdefault(request_id, run.num_steps)
    assert [started[request.request_id] for request in requests] == sorted(started.values())


def test_fuzzed_long_run_with_a_tiny_pool():
    rng = random.Random(7)
    scheduler = make_scheduler(10, swap=6, budget=8, max_num_seqs=8)
    run = FakeRun(scheduler)
    requests = []
    for index in range(60):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 12))]
        n = rng.choice([1, 1, 2])
        most = most_tokens(len(prompt), n, BLOCK_SIZE, 10)
        requests.append(make_request(str(index), prompt, rng.randint(1, min(most, 20)), n=n))
        run.add(requests[-1])
        for _ in range(rng.randrange(6)):
            if scheduler.num_unfinished:
                run.step()
    run.run()
    assert all(run.answers(request.request_id) == solo_answers(request) for request in requests)


def test_a_next_turn_reuses_the_blocks_of_the_answer_before():
    scheduler = make_scheduler(60, budget=64)
    run = FakeRun(scheduler)
    first = make_request("first", [1, 2, 3] * 4, 13)
    run.add(first)
    run.run()
    (answer,) = run.answers("first")
    turn = make_request("second", [*first.prompt_token_ids, *answer, 5, 6], 4)
    run.add(turn)
    group = scheduler.group("second")
    run.run()
    # All full blocks but the last token of the answer, which was never computed.
    assert group.timeline.num_cached_tokens == (len(first.prompt_token_ids) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert run.answers("second") == solo_answers(turn)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_who_comes_back_can_be_found_by_his_prefix_again(mode):
    run, requests = crowded(num_requests=6, num_blocks=14, swap=40, mode=mode)
    groups = [run.scheduler.group(request.request_id) for request in requests]
    run.run()
    last = max((group for group in groups if group.timeline.num_preemptions), key=lambda group: group.timeline.last_step)
    (answer,) = run.answers(last.request.request_id)
    turn = make_request("turn", [*last.request.prompt_token_ids, *answer], 1)
    run.add(turn)
    group = run.scheduler.group("turn")
    run.run()
    assert group.timeline.num_cached_tokens >= BLOCK_SIZE * 2
