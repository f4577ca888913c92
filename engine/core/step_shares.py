"""Who gets a step's tokens: those who lack one first, then pieces of prompts, shared between the first in line and all others."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from pagestream.engine.core.config import SchedulerLimits
from pagestream.engine.core.plan_writer import PlanWriter
from pagestream.engine.core.sequence import Sequence, SequenceGroup

Lacking = tuple[SequenceGroup, Sequence]


class FirstInLine(NamedTuple):
    """Of those who lack more than one token."""

    group: SequenceGroup
    sequence: Sequence
    num_reserved_tokens: int  # of the step, that nobody else may take


class StepShares:
    """Places rows in the plan that is being written; moves no group and no block."""

    def __init__(self, limits: SchedulerLimits, plan: PlanWriter):
        self._limits = limits
        self._plan = plan

    def place(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Schedule up to so many of the sequence's uncomputed tokens, as far as the budget goes."""
        self._plan.place(group, sequence, min(num_tokens, num_computable(group, sequence)))

    def place_decodes(self, running: SequenceOf[SequenceGroup]) -> list[Lacking]:
        """Place every sequence that lacks one token; returns those that lack more."""
        place = self._plan.place
        lacking = []
        for group in running:
            for sequence in group.unfinished:
                num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
                if group.fork_at or group.has_beams:
                    num_tokens = num_computable(group, sequence)
                if num_tokens == 1:
                    place(group, sequence, 1)
                elif num_tokens:
                    lacking.append((group, sequence))
        return lacking

    def spare_decodes(self, running: SequenceOf[SequenceGroup], waiting: SequenceOf[SequenceGroup]) -> None:
        """Who decodes waits for the whole step: prompts beside him must not make it long, unless more wait than decode.

        Of those who decode nobody counts who stood before the oldest of the waiting in line when both waited: that one has let
        him go first once, and need not wait for his answer too.  So requests that come all at once are all soon under way.
        Many who decode, and long contexts, make a step long themselves: prompts beside them may be longer in proportion.
        """
        limits, num_decodes = self._limits, len(self._plan.rows)
        if limits.max_num_prefill_tokens is None or not waiting:
            return
        oldest = min(group.arrival_order for group in waiting)
        num_counted = num_decodes - sum(len(group.unfinished) for group in running if stood_before(group, oldest))
        if len(waiting) > num_counted:
            return
        in_proportion = limits.num_prefill_tokens_per_decode * num_decodes
        if limits.num_context_tokens_per_prefill_token:
            in_proportion += sum(row.start for row in self._plan.rows) // limits.num_context_tokens_per_prefill_token
        num_tokens = min(self._plan.num_tokens_left, max(limits.max_num_prefill_tokens, in_proportion))
        if num_tokens > limits.num_rows_at_once:
            num_tokens -= (num_decodes + num_tokens) % limits.num_rows_at_once
        self._plan.num_tokens_left = num_tokens

    def place_prefills(self, lacking: list[Lacking], num_coming: int) -> FirstInLine | None:
        """Share half of what the decodes left among those who lack more than one token, shortest first.

        The first in line is returned instead: the other half is its own, and whatever nobody else takes.  So a short prompt
        passes a long one, and the long one still moves in every step.  Those of about one length, a factor of two at most, keep
        their order: who came first would gain nothing by being passed.  Where others wait to be taken in (`num_coming`), half of
        the others' half is left to them: once inside, they too are served shortest first.
        """
        if not lacking:
            return None
        oldest, *others = lacking
        num_reserved = -(-self._plan.num_tokens_left // 2)
        num_left = num_reserved + ((self._plan.num_tokens_left - num_reserved) // 2 if num_coming else 0)
        for group, sequence in sorted(others, key=lambda pair: pair[1].num_uncomputed_tokens.bit_length()):
            self.place(group, sequence, self._plan.num_tokens_left - num_left)
        return FirstInLine(*oldest, num_reserved)


def stood_before(group: SequenceGroup, arrival_order: int) -> bool:
    """Whether it decodes, and waited before that arrival in line."""
    return group.arrival_order < arrival_order < group.num_arrived_by_answer


def num_computable(group: SequenceGroup, sequence: Sequence) -> int:
    """How many of its uncomputed tokens may be computed now."""
    if group.fork_at:
        # Others wait for the first one's blocks: stop there, so that it can't end before they have taken them over.
        return group.fork_at - sequence.num_computed_tokens if sequence is group.unfinished[0] else 0
    if group.has_beams and len(group.unfinished) > 1 and any(other.num_uncomputed_tokens > 1 for other in group.unfinished):
        # The choice among beams needs the logits of all: whoever is ahead waits before his last token.
        return sequence.num_uncomputed_tokens - 1
    return sequence.num_uncomputed_tokens
