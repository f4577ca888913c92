"""One stream of tokens, and the group of them that one request owns.  Written by the scheduler only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagestream.engine.core.errors import InvariantBroken
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request


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

    __slots__ = ("cumulative_logprob", "finish_reason", "fork_source", "index", "num_computed_tokens", "num_prompt_tokens", "seed", "seq_id", "token_ids")

    def __init__(self, seq_id: int, index: int, token_ids: list[int], num_prompt_tokens: int, seed: int):
        self.seq_id = seq_id
        self.index = index  # which of the request's n answers
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed
        self.num_computed_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob = 0.0
        # After a recompute, the sequence whose blocks of the common prompt this one takes over as soon as they are computed.
        self.fork_source: Sequence | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(slots=True)
class Timeline:
    """What happened to a group so far, in tokens, blocks and steps; times are the hall's."""

    first_step: int | None = None
    last_step: int | None = None
    prefill_chunks: list[int] = field(default_factory=list)  # tokens of each
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    num_recomputed_tokens: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_steps: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_recompute + self.num_preemptions_swap


class SequenceGroup:
    """One request and its sequences; lives in exactly one queue.  Finished sequences stay until the group is."""

    __slots__ = ("arrival_order", "num_unborn", "request", "sequences", "status", "timeline")

    def __init__(self, request: Request, arrival_order: int, first: Sequence):
        self.request = request
        self.arrival_order = arrival_order
        self.sequences = [first]
        self.num_unborn = request.sampling_params.num_sequences - 1  # forked off when the prompt is computed
        self.status = GroupStatus.WAITING
        self.timeline = Timeline()

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def num_live_sequences(self) -> int:
        """Sequences that may take part in a step, the unborn included."""
        return len(self.unfinished) + self.num_unborn

    def move_to(self, status: GroupStatus) -> None:
        if status not in ALLOWED[self.status]:
            raise InvariantBroken(f"request {self.request.request_id} can't go from {self.status.value} to {status.value}")
        self.status = status
