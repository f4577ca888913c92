"""What the engine tells those who watch it.  Plain numbers; how they are exported is the watcher's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagestream.engine.core.outputs import FinishReason, Usage
from pagestream.engine.core.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, after its commit."""

    num_running: int  # requests
    num_waiting: int
    num_swapped: int
    num_used_blocks: int  # referenced by a running or waiting sequence; cached blocks that nobody holds are free
    num_blocks: int
    num_scheduled_tokens: int
    num_waiting_preempted: int = 0  # of those that wait: had begun, gave way, and will be computed again
    num_used_swap_blocks: int = 0
    num_swap_blocks: int = 0
    num_preempted_recompute: int = 0
    num_preempted_swap: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0  # copy-on-write
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed before, lost to a preemption
    num_failed: int = 0  # sequences that could not be computed or judged
    num_corrupted: int = 0  # of them, those whose logits were no finite numbers
    # Of every so many-th block, see BlockAges.
    block_lifetimes_s: tuple[float, ...] = ()
    block_idle_times_s: tuple[float, ...] = ()
    block_reuse_gaps_s: tuple[float, ...] = ()
    # The parts of the step; their sum is its time.
    schedule_s: float = 0.0  # the decision before, and the commit after
    forward_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0  # text, stop strings and verdicts


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request at its end; times of the monotonic clock, None where that edge was never reached."""

    request_id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    n: int
    max_tokens: int
    arrival_s: float
    scheduled_s: float | None  # first time in a step
    first_token_s: float | None
    finished_s: float
    num_preemptions: int = 0
    max_answer_tokens: int = 0  # of the longest of the n answers


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Where one request stands."""

    request_id: str
    status: str  # waiting | running | swapped | finished
    finish_reason: FinishReason | None
    usage: Usage  # so far
    timeline: RequestTimeline


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Of a request that nothing has been computed of yet."""

    position: int  # 1 is next
    wait_s: float  # at the pace at which requests have finished lately; 0 where none has


class EngineListener(Protocol):
    """Called from the engine's thread; must return quickly and never raise."""

    def step_done(self, stats: StepStats) -> None: ...
    def prompt_computed(self, num_prompt_tokens: int, num_cached_tokens: int) -> None: ...
    def first_token(self, seconds_since_arrival: float) -> None: ...
    def tokens_emitted(self, num_tokens: int, seconds_since_last: float | None) -> None: ...  # None for a sequence's first
    def request_finished(self, stats: RequestStats) -> None: ...
    def kernel_compiled(self) -> None: ...  # after the engine was ready: somebody's request has waited for it
    def request_rejected(self, reason: str) -> None: ...  # queue_full | queue_tokens | hopeless | draining | loading
