"""The scheduler without a model: the same core, a fake executor and a virtual clock.

Answers how many machines a load needs, before one is bought, and replays loads through changes of core: the same trace gives the
same report, to the byte.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import StepPlan
from pagestream.engine.core.stopping import Verdict, most_blocks
from pagestream.engine.simulated_machine import MICROSECONDS, Machine
from pagestream.engine.trace import TraceRequest

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a request found when it arrived."""

    step: int
    num_steps_in_front: int  # that all unfinished requests need at most, one after the other
    num_preemptions: int


class Live:
    """One request of the trace on its way."""

    __slots__ = ("arrival_us", "end", "go_on", "last_us", "num_left", "num_steps", "seen")

    def __init__(self, asked: TraceRequest, token_id: int, arrival_us: int, num_steps: int, seen: Seen):
        self.arrival_us = arrival_us
        self.num_left = asked.output_tokens
        self.last_us: int | None = None  # when it had its last token
        self.num_steps = num_steps  # that it needs at most once it is first in line
        self.seen = seen
        # Nobody else's token, so that only what the trace says is shared.
        self.go_on = Verdict((token_id,))
        self.end = Verdict((token_id,), FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, counts: Counter[int]) -> Spread:
        """By the nearest rank, of microseconds and how often each came."""
        total = counts.total()
        if not total:
            return cls(0.0, 0.0, 0.0, 0.0)
        ranks = [-(-total * percent // 100) for percent in PERCENTILES]
        found: list[float] = []
        num_passed = 0
        largest = 0
        for largest, count in sorted(counts.items()):
            num_passed += count
            while len(found) < len(ranks) and num_passed >= ranks[len(found)]:
                found.append(largest / MICROSECONDS)
        p50, p90, p99 = found
        return cls(p50, p90, p99, largest / MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a trace."""

    num_requests: int
    num_refused: int  # too large for the pool
    num_finished: int
    duration_s: float  # from the first arrival to the last token
    busy_share: float  # of that time, in steps
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread  # arrival to first token
    inter_token_s: Spread
    wait_s: Spread  # arrival to first step
    longest_wait_steps: int
    longest_wait_share_of_bound: float  # largest share of the steps that a request may wait (engine/core/README.md); never above 1
    num_steps: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    recomputed_share: float
    num_preempted_recompute: int
    num_preempted_swap: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    prefix_hit_share: float  # of the prompt tokens looked up
    peak_blocks: int
    num_blocks: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Simulation:
    """One run of a trace, given in the order of arrival, through one machine."""

    def __init__(self, machine: Machine, trace: Sequence[TraceRequest]):
        self._machine = machine
        self._trace = trace
        self._scheduler = machine.scheduler()
        self._live: dict[int, Live] = {}  # by seq_id
        self._params = SamplingParams(max_tokens=None)
        self._now_us = self._busy_us = 0
        self._num_steps = self._num_steps_in_front = 0
        self._num_refused = self._num_finished = self._num_tokens = self._num_output_tokens = self._peak_blocks = 0
        self._first_token_us: Counter[int] = Counter()
        self._between_us: Counter[int] = Counter()
        self._wait_us: Counter[int] = Counter()
        self._longest_wait = 0
        self._most_recompute_steps = 0  # that bring one request back after a preemption, the step that drives it out included
        self._largest_share = 0.0

    def run(self) -> Report:
        with paused_collector():
            index = 0
            while index < len(self._trace) or self._live:
                if not self._live:
                    self._now_us = max(self._now_us, microseconds(self._trace[index].arrival_s))
                while index < len(self._trace) and microseconds(self._trace[index].arrival_s) <= self._now_us:
                    self._arrive(self._trace[index], index)
                    index += 1
                if self._live:
                    self._step()
        return self._report()

    def _arrive(self, asked: TraceRequest, number: int) -> None:
        machine = self._machine
        if most_blocks(asked.prompt_tokens, asked.output_tokens, 1, machine.block_size) > machine.num_blocks:
            self._num_refused += 1
            return
        token_id = 2 * number
        prompt = (token_id,) * asked.prompt_tokens
        if asked.prefix_id is not None and asked.prefix_tokens:
            prompt = (prefix_token(asked.prefix_id),) * asked.prefix_tokens + prompt[asked.prefix_tokens :]
        arrival_us = microseconds(asked.arrival_s)
        request = Request(str(number), prompt, self._params, arrival_us / MICROSECONDS, asked.output_tokens, 0)
        num_steps = -(-asked.prompt_tokens // machine.least_prefill_tokens) + asked.output_tokens
        self._most_recompute_steps = max(
            self._most_recompute_steps, 1 + -(-(asked.prompt_tokens + asked.output_tokens) // machine.least_prefill_tokens)
        )
        seen = Seen(self._num_steps, self._num_steps_in_front, self._num_preemptions)
        seq_id = self._scheduler.add(request).sequences[0].seq_id
        self._live[seq_id] = Live(asked, token_id, arrival_us, num_steps, seen)
        self._num_steps_in_front += num_steps

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        pool = self._scheduler.blocks.device
        self._peak_blocks = max(self._peak_blocks, pool.num_blocks - pool.num_free)
        for admitted in plan.admitted:
            self._note_wait(self._live[admitted.seq_id])
        step_us = self._machine.costs.step_us(plan)
        self._num_steps += 1
        self._busy_us += step_us
        self._now_us += step_us
        self._num_tokens += plan.num_tokens
        self._scheduler.commit(plan, self._verdicts(plan))

    def _verdicts(self, plan: StepPlan) -> dict[int, Verdict]:
        """Every row that is due a token gets one."""
        now_us, between_us, live_by_id = self._now_us, self._between_us, self._live
        verdicts = {}
        for row in plan.scheduled:
            if not row.samples:
                continue
            live = live_by_id[row.seq_id]
            if live.last_us is None:
                self._first_token_us[now_us - live.arrival_us] += 1
            else:
                between_us[now_us - live.last_us] += 1
            live.last_us = now_us
            live.num_left -= 1
            if live.num_left:
                verdicts[row.seq_id] = live.go_on
            else:
                verdicts[row.seq_id] = live.end
                self._num_finished += 1
                self._num_steps_in_front -= live.num_steps
                del live_by_id[row.seq_id]
        self._num_output_tokens += len(verdicts)
        return verdicts

    def _note_wait(self, live: Live) -> None:
        self._wait_us[self._now_us - live.arrival_us] += 1
        num_waited = self._num_steps - live.seen.step
        self._longest_wait = max(self._longest_wait, num_waited)
        num_preemptions = self._num_preemptions - live.seen.num_preemptions
        bound = live.seen.num_steps_in_front + num_preemptions * self._most_recompute_steps
        if num_waited:
            self._largest_share = max(self._largest_share, num_waited / max(bound, 1))

    @property
    def _num_preemptions(self) -> int:
        return self._scheduler.counters.num_preempted_recompute + self._scheduler.counters.num_preempted_swap

    def _report(self) -> Report:
        counters = self._scheduler.counters
        started_us = microseconds(self._trace[0].arrival_s) if self._trace else 0
        duration_s = (self._now_us - started_us) / MICROSECONDS
        return Report(
            num_requests=len(self._trace),
            num_refused=self._num_refused,
            num_finished=self._num_finished,
            duration_s=duration_s,
            busy_share=share(self._busy_us / MICROSECONDS, duration_s),
            requests_per_s=share(self._num_finished, duration_s),
            output_tokens_per_s=share(self._num_output_tokens, duration_s),
            ttft_s=Spread.of(self._first_token_us),
            inter_token_s=Spread.of(self._between_us),
            wait_s=Spread.of(self._wait_us),
            longest_wait_steps=self._longest_wait,
            longest_wait_share_of_bound=round(self._largest_share, 6),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            recomputed_share=share(counters.num_recomputed_tokens, self._num_tokens),
            num_preempted_recompute=counters.num_preempted_recompute,
            num_preempted_swap=counters.num_preempted_swap,
            num_swapped_out_blocks=counters.num_swapped_out_blocks,
            num_swapped_in_blocks=counters.num_swapped_in_blocks,
            prefix_hit_share=share(counters.num_prefix_hit_tokens, counters.num_prefix_queried_tokens),
            peak_blocks=self._peak_blocks,
            num_blocks=self._machine.num_blocks,
        )


def simulate(machine: Machine, trace: Sequence[TraceRequest]) -> Report:
    return Simulation(machine, trace).run()


def capacity(machine: Machine, trace: Sequence[TraceRequest]) -> float:
    """Requests per second that the machine serves of this trace's kind when there is always somebody waiting."""
    return simulate(machine, [replace(one, arrival_s=0.0) for one in trace]).requests_per_s


def microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def prefix_token(prefix_id: str) -> int:
    """A token id that is no request's own, those being even."""
    return 2 * int.from_bytes(blake2b(prefix_id.encode(), digest_size=7).digest(), "little") + 1


def share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0


@contextmanager
def paused_collector() -> Iterator[None]:
    """Nothing here refers to itself in a circle, and looking for such circles among a long queue takes longer than the steps."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
