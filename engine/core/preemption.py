"""Who has to give way when the pool is empty, and what becomes of his blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import PreemptionMode
from pagestream.engine.core.sequence import SequenceGroup

# A group that gave way so often is spared as long as somebody else can go, so that nobody is chosen for ever.
MAX_PREEMPTIONS_BEFORE_SPARED = 3


@dataclass(slots=True)
class PreemptionCosts:
    """Seconds, as measured by the hall; the defaults are guesses that the first measurements replace."""

    recompute_s_per_token: float = 1e-3
    copy_s_per_block: float = 1e-4


class PreemptionPolicy:
    """Chooses, changes nothing."""

    def __init__(self, mode: PreemptionMode, costs: PreemptionCosts, blocks: BlockManager):
        self.mode = mode
        self.costs = costs
        self._blocks = blocks

    def victim(self, running: SequenceOf[SequenceGroup]) -> SequenceGroup | None:
        """The cheapest to lose among the lowest priority, never the first in line; None if the first is alone.

        `running` is in the order of service.  Those spared go only when everybody else is spared too, and then the
        last in line goes: with the first in line always served, and nobody new admitted before those who gave way are
        back, every group gives way a bounded number of times.
        """
        candidates = list(running[1:])
        if not candidates:
            return None
        lowest = max(group.order[0] for group in candidates)
        candidates = [group for group in candidates if group.order[0] == lowest]
        open_to_choice = [group for group in candidates if group.timeline.num_preemptions < MAX_PREEMPTIONS_BEFORE_SPARED]
        if not open_to_choice:
            return candidates[-1]
        return min(open_to_choice, key=lambda group: (self.loss_s(group), -group.arrival_order))

    def loss_s(self, group: SequenceGroup) -> float:
        """What losing the group's blocks costs, by the cheaper way that its mode allows."""
        return self.swap_s(group) if self.swaps(group) else self.recompute_s(group)

    def swaps(self, group: SequenceGroup) -> bool:
        """Whether its blocks are kept in the swap pool: never where they do not fit."""
        if self.mode is PreemptionMode.RECOMPUTE or self._blocks.host.num_blocks == 0:
            return False
        sequences = [sequence for sequence in group.unfinished if self._blocks.has_table(sequence.seq_id)]
        if len(sequences) < len(group.unfinished) or self._blocks.host.num_free < self._blocks.num_distinct(sequences):
            return False
        return self.mode is PreemptionMode.SWAP or self.swap_s(group) <= self.recompute_s(group)

    def swap_s(self, group: SequenceGroup) -> float:
        return 2 * self._blocks.num_distinct(group.unfinished) * self.costs.copy_s_per_block

    def recompute_s(self, group: SequenceGroup) -> float:
        first, *others = group.unfinished
        num_tokens = first.num_computed_tokens
        num_tokens += sum(max(0, other.num_computed_tokens - other.num_prompt_tokens) for other in others)
        return num_tokens * self.costs.recompute_s_per_token
