"""Why a request took as long as it did: counts by the scheduler, times by the hall."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """A request's way so far, for whoever asks why it took so long.  Times are seconds since its arrival; None: not yet."""

    queued_s: float | None  # until its first step
    first_token_s: float | None
    last_token_s: float | None
    num_steps: int
    prefill_chunks: tuple[int, ...]  # tokens of each, those computed again included
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_recomputed_tokens: int  # computed before, lost to a preemption
    num_preemptions_recompute: int
    num_preemptions_swap: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_swapped_bytes: int  # both ways


@dataclass(slots=True)
class Timeline:
    """What happened to a group so far, in tokens, blocks and steps.  Written by the scheduler."""

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
