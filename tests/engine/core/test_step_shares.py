"""How the tokens of a step are shared out between those who decode, the first in line, and the other prompts."""

from __future__ import annotations

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import SchedulerLimits
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.step_plan import StepPlan
from tests.engine.core.fake_run import BLOCK_SIZE, FakeRun, make_request, make_scheduler


def test_a_short_prompt_passes_a_long_one_and_the_long_one_still_moves():
    scheduler = make_scheduler(100, budget=16)
    run = FakeRun(scheduler)
    run.add(make_request("long", list(range(200)), 2))
    run.step()
    run.add(make_request("short", [7, 8, 9], 2))
    long_group = scheduler.group("long")
    done = [long_group.sequences[0].num_computed_tokens]
    while not run.texts["short"]:
        run.step()
        done.append(long_group.sequences[0].num_computed_tokens)
    assert not run.texts["long"]
    assert all(later - earlier >= 8 for earlier, later in zip(done, done[1:], strict=False))


def test_prompts_of_about_one_length_keep_their_order():
    run = FakeRun(make_scheduler(400, budget=16))
    for name, num_tokens in (("first", 200), ("earlier", 60), ("later", 50), ("short", 9)):
        run.add(make_request(name, [num_tokens] * num_tokens, 40))
    answered: list[str] = []
    while len(answered) < 4:
        run.step()
        answered += [name for name, text in run.texts.items() if text and name not in answered]
    assert answered == ["short", "earlier", "later", "first"]


def test_the_first_in_line_gets_half_of_the_step_however_many_others_are_computed_and_come_in():
    scheduler = make_scheduler(400, budget=16)
    run = FakeRun(scheduler)
    run.add(make_request("first", list(range(200)), 2))
    run.step()
    first = scheduler.group("first").sequences[0]
    for number in range(6):
        run.add(make_request(f"other{number}", [number] * 60, 2))
        others_before = sum(group.sequences[0].num_computed_tokens for group in scheduler.running[1:])
        before = first.num_computed_tokens
        run.step()
        assert first.num_computed_tokens - before >= 8
        assert scheduler.group(f"other{number}") in scheduler.running, "who comes is taken in beside those who are computed"
        assert sum(group.sequences[0].num_computed_tokens for group in scheduler.running[1:]) - others_before == 8
    run.run()


def test_prompts_beside_decodes_keep_the_step_short():
    blocks = BlockManager(200, BLOCK_SIZE)
    run = FakeRun(Scheduler(SchedulerLimits(8, 64, max_num_prefill_tokens=10), blocks))
    run.add(make_request("decodes", [1, 2, 3], 40))
    run.step()
    run.add(make_request("prompt", [5] * 100, 2))
    while not run.texts["prompt"]:
        run.step()
        if len(run.plans[-1].scheduled) > 1:
            assert run.plans[-1].num_tokens <= 11
    run.run()


def step_with_a_prompt_beside(num_decodes: int, limits: SchedulerLimits, num_repeats: int = 1) -> StepPlan:
    """The first step in which a prompt of 100 tokens is computed beside those who decode, of three tokens' repeats each."""
    run = FakeRun(Scheduler(limits, BlockManager(200, BLOCK_SIZE)))
    for number in range(num_decodes):
        run.add(make_request(f"decodes{number}", [1, 2, number] * num_repeats, 40))
    run.step()
    run.add(make_request("prompt", [5] * 100, 2))
    run.step()
    return run.plans[-1]


def test_many_who_decode_let_more_of_a_prompt_in_beside_them():
    limits = SchedulerLimits(8, 64, max_num_prefill_tokens=10, num_prefill_tokens_per_decode=4)
    assert step_with_a_prompt_beside(5, limits).num_tokens == 5 + 5 * 4


def test_long_contexts_let_more_of_a_prompt_in_beside_them():
    limits = SchedulerLimits(8, 256, max_num_prefill_tokens=10, num_context_tokens_per_prefill_token=5)
    *decodes, prompt = step_with_a_prompt_beside(2, limits, num_repeats=30).scheduled
    assert len(prompt.token_ids) == sum(row.start for row in decodes) // 5 >= 18


def test_prompts_beside_decodes_fill_what_is_multiplied_at_once():
    limits = SchedulerLimits(8, 256, max_num_prefill_tokens=40, num_rows_at_once=16)
    plan = step_with_a_prompt_beside(3, limits)
    assert plan.num_tokens == 32
    assert len(plan.scheduled) > 1


def test_prompts_take_the_whole_step_where_more_wait_than_decode():
    run = FakeRun(Scheduler(SchedulerLimits(8, 64, max_num_prefill_tokens=10), BlockManager(200, BLOCK_SIZE)))
    run.add(make_request("decodes", [1, 2, 3], 40))
    run.step()
    for number in range(2):
        run.add(make_request(f"prompt{number}", [5 + number] * 100, 40))
    run.step()
    assert run.plans[-1].num_tokens == 64
    while not run.texts["prompt0"]:
        run.step()
    run.step()
    assert run.plans[-1].num_tokens <= 2 + 10  # two decode, one waits


def test_who_waited_behind_another_does_not_wait_for_his_answer_too():
    run = FakeRun(Scheduler(SchedulerLimits(8, 64, max_num_prefill_tokens=10), BlockManager(200, BLOCK_SIZE)))
    run.add(make_request("first", [1, 2, 3], 40))
    run.add(make_request("second", [5] * 100, 2))
    run.step()
    run.step()
    assert run.texts["first"]
    assert run.plans[-1].num_tokens == 1 + 100 - 61
    run.run()


def test_who_passed_a_long_prompt_is_spared_its_pieces():
    run = FakeRun(Scheduler(SchedulerLimits(8, 64, max_num_prefill_tokens=10), BlockManager(200, BLOCK_SIZE)))
    run.add(make_request("long", [5] * 300, 2))
    run.step()
    run.add(make_request("short", [1, 2, 3], 40))
    run.step()
    assert run.texts["short"]
    run.step()
    assert run.plans[-1].num_tokens == 1 + 10
    run.run()
