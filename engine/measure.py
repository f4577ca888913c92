"""A machine for the simulation, as the server would be on this one: its limits, its pool, and what its steps take."""

from __future__ import annotations

from pagestream.engine.core.config import EngineConfig
from pagestream.engine.factory import build_engine
from pagestream.engine.runner.profiling import StepTimes, measure_steps
from pagestream.engine.simulated_machine import CostModel, Machine


def measure_machine(config: EngineConfig) -> Machine:
    """Load the model, size the cache, and time some steps.  Takes seconds; raises StartError."""
    engine = build_engine(config).engine
    limits, blocks = engine.scheduler.limits, engine.scheduler.blocks
    times = measure_steps(
        engine.executor, limits.max_num_batched_tokens, blocks.block_size, blocks.device.num_blocks, engine.intake.limits.max_model_len
    )
    return Machine(
        limits=limits,
        num_blocks=blocks.device.num_blocks,
        block_size=blocks.block_size,
        num_swap_blocks=blocks.host.num_blocks,
        enable_prefix_caching=blocks.enable_prefix_caching,
        costs=to_cost_model(times, engine.scheduler.costs.copy_s_per_block),
    )


def to_cost_model(times: StepTimes, block_copy_s: float) -> CostModel:
    """The straight lines through what was measured; a negative slope is noise."""
    token_s = max(0.0, times.chunk_s - times.one_token_s) / max(1, times.num_chunk_tokens - 1)
    return CostModel(
        step_s=max(1e-6, times.one_token_s - token_s),
        token_s=token_s,
        context_token_s=max(0.0, times.late_token_s - times.one_token_s) / max(1, times.num_context_tokens),
        block_copy_s=block_copy_s,
    )
