"""Every kernel that serving can reach, compiled before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted, BlockCopy, Sample, ScheduledSequence, StepPlan
from pagestream.engine.runner.executor import Executor
from pagestream.kernels.compilation import compile_noted, launches_noted

NOBODY = -1  # a sequence of nobody's; the numbers of requests are positive
LONG_PROMPT = 80  # tokens: beyond what attention takes for few, and what quantised linears do
PLANNED_AT_ONCE = 256  # sequences: attention's plan is compiled for that many, and for twice as many each time that is exceeded
PROGRESS_AFTER_S = 1.0
MOST_THREADS = 16


def compile_kernels(
    executor: Executor, *, block_size: int, num_blocks: int, num_swap_blocks: int, max_num_seqs: int, max_num_tokens: int
) -> int:
    """Compile in threads what steps of all kinds would launch; nothing runs on the device.  Returns the number of kernels."""

    def run_all_kinds() -> None:
        for plan in step_kinds(block_size, num_blocks, num_swap_blocks, max_num_seqs, max_num_tokens):
            executor.execute(plan)

    return compile_side_by_side(run_all_kinds)


def compile_side_by_side(work: Callable[[], object]) -> int:
    """Compile in threads what `work` would launch, of which nothing is launched.  Returns the number of kernels."""
    from tqdm import tqdm

    with launches_noted() as launches:
        work()
    with tqdm(desc="kernels", unit="kernel", total=len({launch.kind for launch in launches}), delay=PROGRESS_AFTER_S, disable=None, leave=False) as bar:
        return compile_noted(launches, min(MOST_THREADS, os.cpu_count() or 1), bar.update)


def step_kinds(
    block_size: int, num_blocks: int, num_swap_blocks: int, max_num_seqs: int, max_num_tokens: int
) -> Iterator[StepPlan]:
    """One step of every kind that launches other kernels: lengths, counts and parameters make no difference beyond these."""
    num_tokens = min(LONG_PROMPT, max_num_tokens, num_blocks * block_size)
    table = tuple(range(-(-num_tokens // block_size)))
    sample = (Sample(NOBODY, 0),)
    nobody = Admitted(NOBODY, (0,) * num_tokens, SamplingParams(), seed=0)
    yield StepPlan(0, admitted=(nobody,), scheduled=(ScheduledSequence(NOBODY, (0,) * num_tokens, 0, table, sample),))
    one = ScheduledSequence(NOBODY, (0,), 0, table[:1], sample)
    for num_seqs in numbers_of_sequences(max_num_seqs):
        yield StepPlan(0, scheduled=(one,) * num_seqs)
    pair = (BlockCopy(0, 0),)
    yield StepPlan(0, copies=pair)
    if num_swap_blocks:
        yield StepPlan(0, swap_out=pair, swap_in=pair)
    yield StepPlan(0, retired_seq_ids=(NOBODY,))


def numbers_of_sequences(max_num_seqs: int) -> Iterator[int]:
    """Those of decode steps that launch other kernels than a step of fewer."""
    yield from sorted({1, min(LONG_PROMPT, max_num_seqs)})
    num_seqs = PLANNED_AT_ONCE + 1
    while num_seqs <= max_num_seqs:
        yield num_seqs
        num_seqs = 2 * num_seqs - 1
