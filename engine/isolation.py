"""A step that fails is run again on halves of itself until the guilty sequence is alone, or until what is left fits the memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import (
    Admitted,
    Candidate,
    Sample,
    SampledTokens,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from pagestream.engine.runner.executor import Executor

logger = logging.getLogger(__name__)

PROBE_SEQ_ID = -1  # of nobody's sequence
PROBE_TOKEN_ID = 0


def execute_isolated(executor: Executor, plan: StepPlan) -> StepResult:
    """Execute the plan; where that raises, name the sequences that can't be computed and compute all others.

    Works because a row can be written any number of times, and because its numbers do not depend on its neighbours: computed
    with fewer of them, they are the same bits.  Raises EngineDead where nothing can be computed any more.
    """
    plan = move_blocks(executor, plan)
    try:
        result = executor.execute(plan)
    except Exception as error:
        logger.exception("step %d failed; running it in parts", plan.step_id)
        if not plan.scheduled:
            raise EngineDead(f"a step without sequences failed: {error}") from error
        first_error: Exception | None = error.with_traceback(None)  # its frames hold the step's tensors; the parts need that memory
    else:
        first_error = None
    if first_error is not None:
        result = compute_in_parts(executor, plan)
    if result.failed and len(result.failed) == len(plan.scheduled):
        check_alive(executor, plan, first_error)
    return result


def move_blocks(executor: Executor, plan: StepPlan) -> StepPlan:
    """Do the plan's copies and return what is left of it.

    By themselves, since they alone can't be done twice once rows were computed: the blocks of those who gave way are given to
    others in the same step, so a second swap_out would take the new owner's content for theirs.
    """
    if not (plan.swap_out or plan.swap_in or plan.copies):
        return plan
    try:
        executor.execute(StepPlan(plan.step_id, plan.swap_out, plan.swap_in, plan.copies))
    except Exception as error:
        raise EngineDead(f"the blocks could not be copied: {error}") from error
    return replace(plan, swap_out=(), swap_in=(), copies=())


def compute_in_parts(executor: Executor, plan: StepPlan) -> StepResult:
    bare = replace(plan, admitted=(), retired_seq_ids=())
    try:
        executor.execute(replace(plan, scheduled=()))  # the failed run may not have come to its admissions
    except Exception as error:
        raise EngineDead(f"the step's sequences could not be taken in: {error}") from error
    parts = halves(plan.scheduled) if len(plan.scheduled) > 1 else [plan.scheduled]
    results = [part for rows in parts for part in narrow(executor, bare, rows)]
    sampled: dict[int, SampledTokens] = {}
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    candidates: dict[int, tuple[Candidate, ...]] = {}
    failed: dict[int, str] = {}
    pooled: dict[int, tuple[int, ...]] = {}
    for result in results:
        sampled |= result.sampled
        scored |= result.prompt_logprobs
        candidates |= result.candidates
        failed |= result.failed
        pooled |= result.pooled
    return StepResult(plan.step_id, sampled, scored, candidates, failed, pooled)


def check_alive(executor: Executor, plan: StepPlan, first_error: Exception | None) -> None:
    """After a step of which no row could be computed: raises EngineDead unless a row that is nobody's can be.

    Requests that are each guilty by themselves may meet in one step, and a single one may be all there is.  A row of one token
    that carries nothing of theirs tells them from a device that is lost.  It is written where one of those that failed would
    have written next: that sequence is ended, and nobody else reads the last block of its table.
    """
    try:
        why = probe(executor, plan.scheduled[0].block_table[-1:], plan.step_id)
    except Exception as error:
        raise EngineDead(f"nothing can be computed any more: {first_error or error}") from error
    if why is not None:
        raise EngineDead(f"nothing can be computed any more: {why}")


def probe(executor: Executor, block_table: tuple[int, ...], step_id: int = 0) -> str | None:
    """Compute a token of nobody's, in a block that nobody reads; returns why its numbers are of no use, None if they are."""
    row = ScheduledSequence(PROBE_SEQ_ID, (PROBE_TOKEN_ID,), 0, block_table, (Sample(PROBE_SEQ_ID, 0),))
    nobody = Admitted(PROBE_SEQ_ID, row.token_ids, SamplingParams(temperature=0, max_tokens=1), seed=0)
    failed = executor.execute(StepPlan(step_id, admitted=(nobody,), scheduled=(row,))).failed
    executor.execute(StepPlan(step_id, retired_seq_ids=(PROBE_SEQ_ID,)))
    return failed.get(PROBE_SEQ_ID)


def narrow(executor: Executor, plan: StepPlan, rows: Sequence[ScheduledSequence]) -> list[StepResult]:
    """Results that together cover the rows, each computed or failed."""
    try:
        return [executor.execute(replace(plan, scheduled=tuple(rows)))]
    except Exception as error:
        is_divisible = len(rows) > 1 or is_out_of_memory(error) and len(rows[0].token_ids) > 1
        if not is_divisible:
            return [StepResult(plan.step_id, {}, failed={rows[0].seq_id: f"{type(error).__name__}: {error}"})]
    if len(rows) == 1:
        return [compute_in_chunks(executor, plan, rows[0])]
    return [result for part in halves(rows) for result in narrow(executor, plan, part)]


def is_out_of_memory(error: Exception) -> bool:
    """A fault of the step's size, not of any request."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def compute_in_chunks(executor: Executor, plan: StepPlan, row: ScheduledSequence) -> StepResult:
    """A row that alone is too large for the memory, as two shorter ones: the same bits, since chunks don't show in the numbers."""
    middle = len(row.token_ids) // 2
    pooled_late = min(row.num_pooled, len(row.token_ids) - middle)
    first = row._replace(
        token_ids=row.token_ids[:middle],
        samples=(),
        scored_token_ids=row.scored_token_ids[:middle],
        num_pooled=row.num_pooled - pooled_late,
    )
    second = row._replace(
        token_ids=row.token_ids[middle:],
        start=row.start + middle,
        scored_token_ids=row.scored_token_ids[middle:],
        num_pooled=pooled_late,
    )
    (begun,) = narrow(executor, plan, [first])
    if begun.failed:
        return begun
    (ended,) = narrow(executor, plan, [second])
    scored = begun.prompt_logprobs.get(row.seq_id, ()) + ended.prompt_logprobs.get(row.seq_id, ())
    sums = [result.pooled[row.seq_id] for result in (begun, ended) if row.seq_id in result.pooled]
    return replace(
        ended,
        prompt_logprobs={row.seq_id: scored} if scored else {},
        pooled={row.seq_id: tuple(map(sum, zip(*sums, strict=True)))} if sums else {},
    )


def halves(rows: Sequence[ScheduledSequence]) -> list[Sequence[ScheduledSequence]]:
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]
