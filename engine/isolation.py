"""A step that fails is run again on halves of itself until the guilty sequence is alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.step_plan import Candidate, SampledTokens, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from pagestream.engine.runner.executor import Executor

logger = logging.getLogger(__name__)


def execute_isolated(executor: Executor, plan: StepPlan) -> StepResult:
    """Execute the plan; where that raises, name the sequences that can't be computed and compute all others.

    Works because what a step writes is idempotent, and because a row's numbers do not depend on its neighbours: computed
    with fewer of them, they are the same bits.  Raises EngineDead if nothing can be computed, not even in parts.
    """
    try:
        return executor.execute(plan)
    except Exception as error:
        logger.exception("step %d failed; running it in parts", plan.step_id)
        if not plan.scheduled:
            raise EngineDead(f"a step without sequences failed: {error}") from error
        first_error = error
    try:
        # The copies once, before any part: a part's own writes must not be copied over.
        executor.execute(replace(plan, scheduled=()))
    except Exception as error:
        raise EngineDead(f"the blocks could not be copied: {error}") from error
    bare = replace(plan, swap_out=(), swap_in=(), copies=(), admitted=(), retired_seq_ids=())
    parts = halves(plan.scheduled) if len(plan.scheduled) > 1 else [plan.scheduled]
    results = [part for rows in parts for part in narrow(executor, bare, rows)]
    failed = {seq_id: why for result in results for seq_id, why in result.failed.items()}
    if len(failed) == len(plan.scheduled) > 1:
        raise EngineDead(f"no sequence of the step can be computed: {first_error}") from first_error
    sampled: dict[int, SampledTokens] = {}
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    candidates: dict[int, tuple[Candidate, ...]] = {}
    for result in results:
        sampled |= result.sampled
        scored |= result.prompt_logprobs
        candidates |= result.candidates
    return StepResult(plan.step_id, sampled, scored, candidates, failed)


def narrow(executor: Executor, plan: StepPlan, rows: Sequence[ScheduledSequence]) -> list[StepResult]:
    """Results that together cover the rows, each computed or failed."""
    try:
        return [executor.execute(replace(plan, scheduled=tuple(rows)))]
    except Exception as error:
        if len(rows) == 1:
            return [StepResult(plan.step_id, {}, failed={rows[0].seq_id: f"{type(error).__name__}: {error}"})]
    return [result for part in halves(rows) for result in narrow(executor, plan, part)]


def halves(rows: Sequence[ScheduledSequence]) -> list[Sequence[ScheduledSequence]]:
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]
