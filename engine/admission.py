"""How many may wait: a bounded queue, refused early and with an honest guess of when to come back."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagestream.engine.core.errors import InvalidRequest, Overloaded
from pagestream.engine.core.request import Request
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.metrics import QueuePlace

RATE_WINDOW = 64  # finished requests whose pace says how fast the queue moves
MIN_FINISHED_TO_JUDGE = 8  # from so many on their pace says enough to refuse somebody for it
MAX_RETRY_AFTER_S = 120.0  # clients do not honour a longer wait


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_num_reqs: int  # waiting requests
    max_num_tokens: int | None  # prompt tokens of waiting requests; None: no limit


class AdmissionControl:
    """Counts as queued whatever is beyond the sequences that may run at once.  Event loop's thread only."""

    def __init__(self, engine: LLMEngine, limits: QueueLimits):
        self._engine = engine
        self._limits = limits
        self._finished_s: deque[float] = deque(maxlen=RATE_WINDOW)  # on a clock that stands while there is no work
        self._idle_since_s: float | None = time.monotonic()  # None: there is work
        self._idle_s = 0.0  # in all, before that
        self.is_draining = False

    def work_came(self) -> None:
        if self._idle_since_s is not None:
            self._idle_s += time.monotonic() - self._idle_since_s
            self._idle_since_s = None

    def work_is_done(self) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()

    @property
    def _busy_s(self) -> float:
        now_s = time.monotonic() if self._idle_since_s is None else self._idle_since_s
        return now_s - self._idle_s

    def check_fits(self, num_requests: int, num_sequences: int, param: str) -> None:
        """Raises InvalidRequest where so many would not fit even while nobody else is here: no waiting would help."""
        max_num_seqs, max_num_queued = self._engine.intake.limits.max_num_seqs, self._limits.max_num_reqs
        most = max_num_seqs // num_sequences + max_num_queued
        if num_requests > max(1, most):
            raise InvalidRequest(f"{param} holds {num_requests}, and this engine takes at most {most} of these at once", param=param)

    def check(
        self, num_requests: int, num_sequences: int, inbox: Sequence[Request], time_left_s: float | None = None
    ) -> None:
        """Raises Overloaded unless so many more requests, of so many sequences each, may come in.

        Also where they would be waiting still when their time is over: refused at once, they can be sent elsewhere.
        """
        if self.is_draining:
            self._refuse("draining", "the server is shutting down and takes no new requests", 5.0)
        num_queued = self._num_queued(num_requests, num_sequences, inbox)
        if num_queued > self._limits.max_num_reqs:
            num_waiting = max(0, num_queued - num_requests)
            what = f"the queue holds {self._limits.max_num_reqs} waiting requests at most; there are {num_waiting}"
            self._refuse("queue_full", what, self._retry_after_s(num_requests))
        if self._limits.max_num_tokens is not None and num_queued > 0:
            num_tokens = self._num_waiting_tokens(inbox)
            if num_tokens > self._limits.max_num_tokens:
                what = f"{num_tokens} prompt tokens are waiting; the queue holds {self._limits.max_num_tokens}"
                self._refuse("queue_tokens", what, self._retry_after_s(num_requests))
        if time_left_s is not None and num_queued > 0 and len(self._finished_s) >= MIN_FINISHED_TO_JUDGE:
            wait_s = self.pace_s * num_queued
            if wait_s > time_left_s:
                what = f"about {wait_s:.1f} s of waiting are ahead, more than timeout_s has left"
                self._refuse("hopeless", what, min(MAX_RETRY_AFTER_S, wait_s - time_left_s))

    @property
    def num_places(self) -> int:
        """Of requests of one sequence, those that run and those that wait."""
        return self._engine.intake.limits.max_num_seqs + self._limits.max_num_reqs

    def num_admissible(self, num_requests: int, inbox: Sequence[Request]) -> int:
        """How many of so many requests of one sequence each would come in now."""
        num_queued = self._num_queued(num_requests, 1, inbox)
        max_num_tokens = self._limits.max_num_tokens
        is_full = num_queued > 0 and max_num_tokens is not None and self._num_waiting_tokens(inbox) > max_num_tokens
        num_beyond = num_queued if is_full else num_queued - self._limits.max_num_reqs
        return 0 if self.is_draining else max(0, num_requests - max(0, num_beyond))

    def place(self, request_ids: Sequence[str], inbox: Sequence[Request]) -> QueuePlace | None:
        """Where the first of these requests stands that is waiting; None if they are being computed."""
        groups = list(self._engine.scheduler.waiting)
        waiting = [group.request.request_id for group in groups if group.timeline.first_step is None]
        waiting += [request.request_id for request in inbox]
        position = next((at for at, request_id in enumerate(waiting, 1) if request_id in request_ids), None)
        return None if position is None else QueuePlace(position, position * self.pace_s)

    @property
    def pace_s(self) -> float:
        """Seconds of work between two requests that finish, of late."""
        return (self._busy_s - self._finished_s[0]) / len(self._finished_s) if self._finished_s else 0.0

    def finished(self) -> None:
        self._finished_s.append(self._busy_s)

    def _num_queued(self, num_requests: int, num_sequences: int, inbox: Sequence[Request]) -> int:
        """How many would wait, with so many more requests of so many sequences each."""
        scheduler = self._engine.scheduler
        groups = [*scheduler.running, *scheduler.swapped, *scheduler.waiting]
        sizes = itertools.chain(
            (group.num_live_sequences for group in groups),
            (request.sampling_params.num_sequences for request in inbox),
            itertools.repeat(num_sequences, num_requests),
        )
        return len(groups) + len(inbox) + num_requests - num_within(sizes, self._engine.intake.limits.max_num_seqs)

    def _num_waiting_tokens(self, inbox: Sequence[Request]) -> int:
        num_tokens = sum(len(group.request.prompt_token_ids) for group in list(self._engine.scheduler.waiting))
        return num_tokens + sum(len(request.prompt_token_ids) for request in inbox)

    def _refuse(self, reason: str, message: str, retry_after_s: float) -> None:
        self._engine.watch.rejected(reason)
        raise Overloaded(message, retry_after_s=retry_after_s, draining=reason == "draining")

    def _retry_after_s(self, num_requests: int) -> float:
        """When so many places are likely to be free, at the pace at which requests have finished lately."""
        if len(self._finished_s) < 2:
            return 1.0
        return min(MAX_RETRY_AFTER_S, num_requests * self.pace_s)


def num_within(sizes: Iterable[int], max_num_seqs: int) -> int:
    """How many of these requests, served in this order, fit among the sequences that run at once.  Looks no further than that."""
    totals = itertools.accumulate(sizes)
    return sum(1 for _ in itertools.takewhile(max_num_seqs.__ge__, totals))
