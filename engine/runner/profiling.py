"""What a token and a block cost on this machine, measured once before the first request."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pagestream.engine.core.preemption import PreemptionCosts
from pagestream.engine.core.step_plan import BlockCopy, ScheduledSequence, StepPlan
from pagestream.engine.models.base import CausalLM
from pagestream.engine.runner.batch import TableRows, build_batch
from pagestream.engine.runner.executor import Executor
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.kernels.transfer import HostLink, PinnedLink

MOST_PROFILED_TOKENS = 64
MOST_CHUNK_TOKENS = 256
MOST_CONTEXT_TOKENS = 2048
NUM_TRIES = 3
MOST_PROFILED_BLOCKS = 16


def measure_costs(
    runner: Executor,
    cache: KVCache,
    link: HostLink,
    max_num_batched_tokens: int,
    block_size: int,
    num_blocks: int,
    num_swap_blocks: int,
    max_model_len: int,
) -> PreemptionCosts:
    """Run a prompt of nobody's through blocks that are still free, which also warms everything up, and copy some blocks.

    Must come before the first request: it writes into the pool.  max_model_len: the model has no more positions here.
    """
    num_tokens = min(MOST_PROFILED_TOKENS, max_num_batched_tokens, num_blocks * block_size, max_model_len)
    table = tuple(range(-(-num_tokens // block_size)))
    plan = StepPlan(0, scheduled=(ScheduledSequence(0, (0,) * num_tokens, 0, table),))
    runner.execute(plan)
    link.wait()
    started_s = time.perf_counter()
    runner.execute(plan)
    link.wait()
    costs = PreemptionCosts(recompute_s_per_token=(time.perf_counter() - started_s) / num_tokens)
    num_copied = min(MOST_PROFILED_BLOCKS, num_blocks, num_swap_blocks)
    if num_copied:
        copies = [BlockCopy(block, block) for block in range(num_copied)]
        cache.swap_out(copies)
        link.wait()
        started_s = time.perf_counter()
        cache.swap_out(copies)
        link.wait()
        costs.copy_s_per_block = (time.perf_counter() - started_s) / num_copied
    return costs


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of three kinds of step, each the best of several."""

    one_token_s: float  # of one sequence, at its beginning
    chunk_s: float  # of a prompt's first num_chunk_tokens
    num_chunk_tokens: int
    late_token_s: float  # one token after num_context_tokens others
    num_context_tokens: int


def measure_steps(runner: Executor, max_num_batched_tokens: int, block_size: int, num_blocks: int, max_model_len: int) -> StepTimes:
    """Times of an otherwise idle engine, whose pool this writes into."""
    longest = min(num_blocks * block_size, max_model_len)
    num_chunk = min(MOST_CHUNK_TOKENS, max_num_batched_tokens, longest)
    num_context = min(MOST_CONTEXT_TOKENS, longest) - 1
    table = tuple(range(-(-max(num_chunk, num_context + 1) // block_size)))

    def best_s(num_tokens: int, start: int) -> float:
        plan = StepPlan(0, scheduled=(ScheduledSequence(0, (0,) * num_tokens, start, table),))
        times = []
        for _ in range(NUM_TRIES):
            started_s = time.perf_counter()
            runner.execute(plan)
            times.append(time.perf_counter() - started_s)
        return min(times)

    return StepTimes(best_s(1, 0), best_s(num_chunk, 0), num_chunk, best_s(1, num_context), num_context)


def measure_activations(
    model: CausalLM, num_tokens: int, num_rows: int, block_size: int, device: torch.device, max_model_len: int
) -> int:
    """Bytes that a GPU step of so many tokens, so many of them sampled, needs besides weights and cache.

    Of sequences of max_model_len tokens at most: rotary tables and the attention's plan have no room for longer ones.
    """
    from pagestream.engine.runner.warm_up import compile_side_by_side

    num_blocks = -(-num_tokens // block_size)
    cache = KVCache(
        model.shape, block_size=block_size, num_blocks=num_blocks, num_swap_blocks=0, dtype=model.kv_dtype, device=device
    )
    length = min(num_tokens, max_model_len)
    starts = range(0, num_tokens, length)
    rows = tuple(
        ScheduledSequence(
            number,
            (0,) * min(length, num_tokens - start),
            0,
            tuple(range(start // block_size, -(-min(start + length, num_tokens) // block_size))),
        )
        for number, start in enumerate(starts)
    )
    batch = build_batch(StepPlan(0, scheduled=rows), block_size, PinnedLink(device), TableRows())
    # What this step launches is compiled by many threads at once; launch by launch it would be compiled one after another.
    compile_side_by_side(lambda: model.logits(model.forward(batch.input_ids, cache.layers, batch.metadata)[:num_rows]))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = model.forward(batch.input_ids, cache.layers, batch.metadata)
    logits = model.logits(hidden[:num_rows])
    torch.softmax(logits, -1)  # the sampler works on a copy at most twice that large
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
