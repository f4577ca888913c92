"""What a token and a block cost on this machine, measured once before the first request."""

from __future__ import annotations

import time

from pagestream.engine.core.preemption import PreemptionCosts
from pagestream.engine.core.step_plan import BlockCopy, ScheduledSequence, StepPlan
from pagestream.engine.runner.executor import Executor
from pagestream.engine.runner.kv_cache import KVCache

MOST_PROFILED_TOKENS = 64
MOST_PROFILED_BLOCKS = 16


def measure_costs(
    runner: Executor, cache: KVCache, max_num_batched_tokens: int, block_size: int, num_blocks: int, num_swap_blocks: int
) -> PreemptionCosts:
    """Run a prompt of nobody's through blocks that are still free, which also warms everything up, and copy some blocks.

    Must come before the first request: it writes into the pool.
    """
    num_tokens = min(MOST_PROFILED_TOKENS, max_num_batched_tokens, num_blocks * block_size)
    table = tuple(range(-(-num_tokens // block_size)))
    plan = StepPlan(0, scheduled=(ScheduledSequence(0, (0,) * num_tokens, 0, table),))
    runner.execute(plan)
    started_s = time.perf_counter()
    runner.execute(plan)
    costs = PreemptionCosts(recompute_s_per_token=(time.perf_counter() - started_s) / num_tokens)
    num_copied = min(MOST_PROFILED_BLOCKS, num_blocks, num_swap_blocks)
    if num_copied:
        copies = [BlockCopy(block, block) for block in range(num_copied)]
        cache.swap_out(copies)
        started_s = time.perf_counter()
        cache.swap_out(copies)
        costs.copy_s_per_block = (time.perf_counter() - started_s) / num_copied
    return costs
