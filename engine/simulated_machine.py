"""The machine that a simulation runs on: what it is made of, and what its steps take."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import SchedulerLimits
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.preemption import PreemptionCosts
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.step_plan import StepPlan

MICROSECONDS = 1_000_000  # the clock counts these, so that every sum is exact


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a step takes, in seconds: a sum of these."""

    step_s: float = 0.004  # of every step
    token_s: float = 0.0005  # of each token computed
    context_token_s: float = 0.0  # of each earlier token that a sequence of the step attends to
    block_copy_s: float = 0.0001  # of each block copied, within the pool or to and from swap

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 3600:
                raise StartError(f"{each.name} must be seconds from 0, not {value!r}")
        if not self.step_s + self.token_s > 0:
            raise StartError("step_s and token_s are both 0: a step must take some time")

    def step_us(self, plan: StepPlan) -> int:
        num_tokens = num_context = 0
        for row in plan.scheduled:
            num_tokens += len(row.token_ids)
            num_context += row.start
        num_copies = len(plan.copies) + len(plan.swap_out) + len(plan.swap_in)
        seconds = self.step_s + self.token_s * num_tokens + self.context_token_s * num_context + self.block_copy_s * num_copies
        return max(1, round(seconds * MICROSECONDS))


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated server is made of."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    num_swap_blocks: int = 0
    enable_prefix_caching: bool = True
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_swap_blocks < 0:
            raise StartError(f"num_swap_blocks must not be negative, not {self.num_swap_blocks}")
        if self.limits.max_num_seqs < 1 or self.limits.max_num_batched_tokens < self.limits.max_num_seqs:
            raise StartError("max_num_seqs must be at least 1 and max_num_batched_tokens at least max_num_seqs")

    def scheduler(self) -> Scheduler:
        blocks = BlockManager(
            self.num_blocks,
            self.block_size,
            num_swap_blocks=self.num_swap_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        return Scheduler(self.limits, blocks, PreemptionCosts(self.costs.token_s, self.costs.block_copy_s))

    @property
    def least_prefill_tokens(self) -> int:
        """Tokens of its prompt that the first in line gets in every step at least: half of what the decodes leave."""
        return max(1, (self.limits.max_num_batched_tokens - self.limits.max_num_seqs + 1) // 2)
