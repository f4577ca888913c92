"""Clocks and counts: when each request reached which edge, and how long each part of a step took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pagestream.engine.block_ages import Ages, BlockAges
from pagestream.engine.core.outputs import FinishReason, RequestOutput, Usage
from pagestream.engine.core.request import Request
from pagestream.engine.core.scheduler import Scheduler, SchedulerCounters
from pagestream.engine.core.step_plan import NOT_FINITE
from pagestream.engine.core.timeline import RequestTimeline, Timeline
from pagestream.engine.metrics import EngineListener, RequestInfo, RequestStats, StepStats

Clock = Callable[[], float]

# Of requests that have ended: enough to look one up after its answer, never more than a few megabytes.
MAX_KEPT_REQUESTS = 1024
MAX_KEPT_S = 600.0


class StepTimes:
    """How long the parts of one step took, in seconds; together they are the step."""

    __slots__ = ("_clock", "_last", "detokenize_s", "forward_s", "sample_s", "schedule_s")

    def __init__(self, clock: Clock):
        self._clock = clock
        self._last = clock()
        self.schedule_s = self.forward_s = self.sample_s = self.detokenize_s = 0.0

    def _lap(self) -> float:
        now = self._clock()
        elapsed, self._last = now - self._last, now
        return elapsed

    def scheduled(self) -> None:
        self.schedule_s = self._lap()

    def executed(self, forward_s: float) -> None:
        """`forward_s` is what the executor says of it; 0: it does not tell, and all of it counts as that."""
        elapsed = self._lap()
        self.forward_s = min(forward_s, elapsed) or elapsed
        self.sample_s = elapsed - self.forward_s

    def judged(self) -> None:
        """Text, stop strings and verdicts."""
        self.detokenize_s = self._lap()

    def committed(self) -> None:
        self.schedule_s += self._lap()


@dataclass(slots=True)
class Edges:
    """When one request reached what; None for not yet."""

    request: Request
    counts: Timeline  # the scheduler's own, which it goes on writing
    usage: Usage
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)  # by the answer's index
    num_emitted_tokens: dict[int, int] = field(default_factory=dict)  # by the answer's index


@dataclass(frozen=True, slots=True)
class Ended:
    at_s: float
    info: RequestInfo


class RequestWatch:
    """Tells the listener, if there is one, and whoever asks.  Of those that have ended, the latest are kept for some time."""

    def __init__(
        self,
        listener: EngineListener | None,
        clock: Clock,
        block_bytes: int = 0,
        ages: BlockAges | None = None,
        count_compiled: Callable[[], int] = lambda: 0,
    ):
        self._listener = listener
        self._ages = ages
        self._clock = clock
        self._block_bytes = block_bytes
        self._open: dict[str, Edges] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()  # the latest last
        self._count_compiled = count_compiled
        self._told_compiled = 0
        self._told = SchedulerCounters()  # what earlier step_done calls have reported
        self.num_finished = 0

    def arrived(self, request: Request, counts: Timeline) -> None:
        self._open[request.request_id] = Edges(request, counts, Usage(len(request.prompt_token_ids)))

    def first_scheduled(self, request_id: str) -> bool:
        """Note that a request is in a step; returns whether it is its first."""
        edges = self._open[request_id]
        if edges.scheduled_s is not None:
            return False
        edges.scheduled_s = self._clock()
        return True

    def rejected(self, reason: str) -> None:
        if self._listener is not None:
            self._listener.request_rejected(reason)

    def step_done(self, outputs: Iterable[RequestOutput], stats: StepStats) -> list[RequestOutput]:
        """Count what a step has brought; returns it, the last outputs with the timelines that were asked for."""
        now = self._clock()
        told = []
        for output in outputs:
            self._count_tokens(output, now)
            if output.finished and output.request_id in self._open:
                reason = output.outputs[0].finish_reason if output.outputs else None
                output = self.ended(output, reason or FinishReason.STOP)
            told.append(output)
        if self._listener is not None:
            self._listener.step_done(stats)
            num_compiled = self._count_compiled()
            for _ in range(num_compiled - self._told_compiled):
                self._listener.kernel_compiled()
            self._told_compiled = num_compiled
        return told

    def info(self, request_id: str, status: str) -> RequestInfo | None:
        """Of an open request, whose status the caller knows, or of one that has ended lately; None of any other."""
        edges = self._open.get(request_id)
        if edges is not None:
            return RequestInfo(request_id, status, None, edges.usage, self._timeline(edges))
        ended = self._ended.get(request_id)
        return ended.info if ended is not None and self._clock() - ended.at_s <= MAX_KEPT_S else None

    def ended(self, output: RequestOutput, reason: FinishReason) -> RequestOutput:
        """Note a request's end; returns its last output, with its timeline if it asked for that."""
        edges = self._open.pop(output.request_id, None)
        if edges is None:
            return output
        self.num_finished += 1
        timeline = self._timeline(edges)
        self._keep(RequestInfo(output.request_id, "finished", reason, output.usage, timeline))
        self._tell_end(edges, output, reason)
        return replace(output, timeline=timeline) if edges.request.include_timeline else output

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _keep(self, info: RequestInfo) -> None:
        now = self._clock()
        self._ended.pop(info.request_id, None)
        self._ended[info.request_id] = Ended(now, info)
        while len(self._ended) > MAX_KEPT_REQUESTS or now - next(iter(self._ended.values())).at_s > MAX_KEPT_S:
            self._ended.popitem(last=False)

    def _timeline(self, edges: Edges) -> RequestTimeline:
        arrival_s, counts = edges.request.arrival_time_s, edges.counts

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - arrival_s

        return RequestTimeline(
            queued_s=since(edges.scheduled_s),
            first_token_s=since(edges.first_token_s),
            last_token_s=since(max(list(edges.last_token_s.values()), default=None)),
            num_steps=counts.num_steps,
            prefill_chunks=tuple(counts.prefill_chunks),
            num_cached_tokens=counts.num_cached_tokens,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            num_preemptions_recompute=counts.num_preemptions_recompute,
            num_preemptions_swap=counts.num_preemptions_swap,
            num_swapped_out_blocks=counts.num_swapped_out_blocks,
            num_swapped_in_blocks=counts.num_swapped_in_blocks,
            num_swapped_bytes=(counts.num_swapped_out_blocks + counts.num_swapped_in_blocks) * self._block_bytes,
        )

    def _tell_end(self, edges: Edges, output: RequestOutput, reason: FinishReason) -> None:
        if self._listener is None:
            return
        request, usage = edges.request, output.usage
        self._listener.request_finished(
            RequestStats(
                request_id=request.request_id,
                finish_reason=reason,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_output_tokens=usage.num_output_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                n=request.sampling_params.n,
                max_tokens=request.max_tokens,
                arrival_s=request.arrival_time_s,
                scheduled_s=edges.scheduled_s,
                first_token_s=edges.first_token_s,
                finished_s=self._clock(),
                num_preemptions=edges.counts.num_preemptions,
                max_answer_tokens=max(edges.num_emitted_tokens.values(), default=0),
            )
        )

    def step_stats(
        self, scheduler: Scheduler, times: StepTimes | None = None, num_tokens: int = 0, failed: Mapping[int, str] | None = None
    ) -> StepStats:
        """The gauges of this moment; with `times` also what the last step did, `failed` being its rows that failed."""
        blocks, host = scheduler.blocks.device, scheduler.blocks.host
        ages = self._ages.news() if self._ages is not None and times is not None else Ages()
        reasons = (failed or {}).values()
        new = scheduler.counters
        old = self._told
        stats = StepStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=len(scheduler.swapped),
            num_used_blocks=blocks.num_blocks - blocks.num_free,
            num_blocks=blocks.num_blocks,
            # The queue may be long: counted where a gauge is asked for, not in every step.
            num_waiting_preempted=0 if times else sum(group.timeline.num_preemptions > 0 for group in scheduler.waiting),
            num_used_swap_blocks=host.num_blocks - host.num_free,
            num_swap_blocks=host.num_blocks,
            num_scheduled_tokens=num_tokens,
            num_failed=len(reasons),
            num_corrupted=sum(reason == NOT_FINITE for reason in reasons),
            block_lifetimes_s=tuple(ages.lifetime_s),
            block_idle_times_s=tuple(ages.idle_s),
            block_reuse_gaps_s=tuple(ages.reuse_gap_s),
            num_preempted_recompute=new.num_preempted_recompute - old.num_preempted_recompute,
            num_preempted_swap=new.num_preempted_swap - old.num_preempted_swap,
            num_swapped_out_blocks=new.num_swapped_out_blocks - old.num_swapped_out_blocks,
            num_swapped_in_blocks=new.num_swapped_in_blocks - old.num_swapped_in_blocks,
            num_copied_blocks=new.num_copied_blocks - old.num_copied_blocks,
            num_prefix_queried_tokens=new.num_prefix_queried_tokens - old.num_prefix_queried_tokens,
            num_prefix_hit_tokens=new.num_prefix_hit_tokens - old.num_prefix_hit_tokens,
            num_recomputed_tokens=new.num_recomputed_tokens - old.num_recomputed_tokens,
            schedule_s=times.schedule_s if times else 0.0,
            forward_s=times.forward_s if times else 0.0,
            sample_s=times.sample_s if times else 0.0,
            detokenize_s=times.detokenize_s if times else 0.0,
        )
        if times is not None:
            self._told = new.copy()
        return stats

    def _count_tokens(self, output: RequestOutput, now: float) -> None:
        edges = self._open.get(output.request_id)
        if edges is None:
            return
        edges.usage = output.usage
        if edges.first_token_s is None and (output.outputs or output.finished):
            edges.first_token_s = now
            if self._listener is not None:
                self._listener.prompt_computed(output.usage.num_prompt_tokens, output.usage.num_cached_tokens)
                self._listener.first_token(now - edges.request.arrival_time_s)
        for answer in output.outputs:
            if answer.token_ids:
                last = edges.last_token_s.get(answer.index)
                if self._listener is not None:
                    self._listener.tokens_emitted(len(answer.token_ids), None if last is None else now - last)
                edges.num_emitted_tokens[answer.index] = edges.num_emitted_tokens.get(answer.index, 0) + len(answer.token_ids)
                edges.last_token_s[answer.index] = now
        if output.finished and self._listener is not None:
            # Of answers that were generated and not returned; so the sum is that of all usages.
            num_unseen = output.usage.num_output_tokens - sum(edges.num_emitted_tokens.values())
            if num_unseen > 0:
                self._listener.tokens_emitted(num_unseen, None)
