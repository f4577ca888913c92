"""One stream of tokens, and the group of them that one request owns.  Written by the scheduler only."""

from __future__ import annotations

from enum import Enum

from pagestream.engine.core.errors import InvariantBroken
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request
from pagestream.engine.core.step_plan import Sample
from pagestream.engine.core.timeline import Timeline


class GroupStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


# The whole state machine.  RUNNING -> WAITING: preempted, to be recomputed.
ALLOWED: dict[GroupStatus, set[GroupStatus]] = {
    GroupStatus.WAITING: {GroupStatus.RUNNING, GroupStatus.FINISHED},
    GroupStatus.RUNNING: {GroupStatus.WAITING, GroupStatus.SWAPPED, GroupStatus.FINISHED},
    GroupStatus.SWAPPED: {GroupStatus.RUNNING, GroupStatus.FINISHED},
    GroupStatus.FINISHED: set(),
}


class Sequence:
    """Prompt and answer as one list of tokens, and how far their K and V are in the cache.

    [0, num_computed) in the cache | [num_computed, num_tokens) still to compute; a step lets the first catch up.
    """

    __slots__ = ("finish_reason", "index", "num_computed_tokens", "num_prompt_tokens", "own_sample", "seq_id", "token_ids")

    def __init__(self, seq_id: int, index: int, token_ids: list[int], num_prompt_tokens: int, seed: int):
        self.seq_id = seq_id
        self.index = index  # which of the request's n answers
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.own_sample = (Sample(seq_id, seed),)  # what most of its rows ask for
        self.finish_reason: FinishReason | None = None

    @property
    def seed(self) -> int:
        return self.own_sample[0].seed

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


class SequenceGroup:
    """One request and its sequences; lives in exactly one queue.

    `sequences` are all answers that were born, `unfinished` those of them that go on, in the same order.  Of beams, those that
    were left behind are in neither.
    """

    __slots__ = (
        "arrival_order", "fork_at", "has_beams", "num_arrived_by_answer", "num_unborn", "order", "request", "sequences", "status", "timeline",
        "unfinished",
    )  # fmt: skip

    def __init__(self, request: Request, arrival_order: int, order: tuple[int, int], first: Sequence):
        self.request = request
        self.arrival_order = arrival_order
        self.num_arrived_by_answer = 0  # requests that had arrived when its first token was there; 0: it has none yet
        self.order = order  # among all groups of the scheduler, first in line first
        self.sequences = [first]
        self.unfinished = [first]
        self.num_unborn = request.sampling_params.num_sequences - 1  # forked off when the prompt is computed, or by a beam search
        self.has_beams = request.sampling_params.use_beam_search
        # After a recompute: as soon as the first unfinished sequence has so many tokens computed, which all of them begin with,
        # the others take over its blocks.  Until then they hold nothing.  0: nobody waits for that.
        self.fork_at = 0
        self.status = GroupStatus.WAITING
        self.timeline = Timeline()

    @property
    def num_live_sequences(self) -> int:
        """Sequences that may take part in a step, the unborn included."""
        return len(self.unfinished) + self.num_unborn

    def move_to(self, status: GroupStatus) -> None:
        if status not in ALLOWED[self.status]:
            raise InvariantBroken(f"request {self.request.request_id} can't go from {self.status.value} to {status.value}")
        self.status = status


def num_common_tokens(sequences: list[Sequence]) -> int:
    """How many tokens all of these have in common from the start, the last one of each left out."""
    first, *others = sequences
    num_common = min(sequence.num_tokens for sequence in sequences) - 1
    for other in others:
        for position in range(first.num_prompt_tokens, num_common):
            if other.token_ids[position] != first.token_ids[position]:
                num_common = position
                break
    return num_common
