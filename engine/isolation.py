"""A step that fails is run again on halves of itself until the guilty sequence is alone, or until what is left fits the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.step_plan import Candidate, SampledTokens, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from pagestream.engine.runner.executor import Executor

logger = logging.getLogger(__name__)


def execute_isolated(
    executor: Executor, plan: StepPlan, owner_of: Callable[[int], object] = lambda seq_id: seq_id
) -> StepResult:
    """Execute the plan; where that raises, name the sequences that can't be computed and compute all others.

    Works because what a step writes is idempotent, and because a row's numbers do not depend on its neighbours: computed
    with fewer of them, they are the same bits.  Raises EngineDead if nothing can be computed, not even in parts, and
    that can't be the fault of a single request; `owner_of` says whose a sequence is.
    """
    try:
        return executor.execute(plan)
    except Exception as error:
        logger.exception("step %d failed; running it in parts", plan.step_id)
        if not plan.scheduled:
            raise EngineDead(f"a step without sequences failed: {error}") from error
        first_error = error.with_traceback(None)  # its frames hold the step's tensors, and the parts need their memory
    try:
        # The copies once, before any part: a part's own writes must not be copied over.
        executor.execute(replace(plan, scheduled=()))
    except Exception as error:
        raise EngineDead(f"the blocks could not be copied: {error}") from error
    bare = replace(plan, swap_out=(), swap_in=(), copies=(), admitted=(), retired_seq_ids=())
    parts = halves(plan.scheduled) if len(plan.scheduled) > 1 else [plan.scheduled]
    results = [part for rows in parts for part in narrow(executor, bare, rows)]
    failed = {seq_id: why for result in results for seq_id, why in result.failed.items()}
    if len(failed) == len(plan.scheduled) and len({owner_of(seq_id) for seq_id in failed}) > 1:
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
    first = row._replace(token_ids=row.token_ids[:middle], samples=(), scored_token_ids=row.scored_token_ids[:middle])
    second = row._replace(
        token_ids=row.token_ids[middle:], start=row.start + middle, scored_token_ids=row.scored_token_ids[middle:]
    )
    (begun,) = narrow(executor, plan, [first])
    if begun.failed:
        return begun
    (ended,) = narrow(executor, plan, [second])
    scored = begun.prompt_logprobs.get(row.seq_id, ()) + ended.prompt_logprobs.get(row.seq_id, ())
    return replace(ended, prompt_logprobs={row.seq_id: scored} if scored else {})


def halves(rows: Sequence[ScheduledSequence]) -> list[Sequence[ScheduledSequence]]:
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]
