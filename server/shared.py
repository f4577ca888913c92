"""Answers that outlive their connection: streams that can be resumed, and requests that may be sent twice.

Such an answer is computed by a task of its own, and its events are kept in a log (see event_log.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import gt

from fastapi import Request

from pagestream.engine import InvalidRequest, Overloaded
from pagestream.server.answer import Answer, encode
from pagestream.server.body import IDEMPOTENCY_KEY
from pagestream.server.errors import NO_RETRY, HttpError
from pagestream.server.event_log import EventLog, Position
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import EventStream, answer_events

log = logging.getLogger(__name__)

MAX_KEY_CHARS = 255
MAX_CHOICES = 32  # a position names each of them, in every event
MAX_SHARED = 4096  # answers, whatever their size


@dataclass(frozen=True, slots=True)
class Claim:
    """An Idempotency-Key, within what its owner may see, and what it was sent with."""

    key: str
    digest: str


def claim_of(http: Request) -> Claim | None:
    """Raises InvalidRequest for a key that is none."""
    key = http.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} printable characters", param="Idempotency-Key")
    owner = [http.headers.get(name, "") for name in ("authorization", "x-api-key")]  # wherever its key is
    return Claim(hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest(), f"{http.url.path} {http.state.body_digest}")


class SharedAnswer:
    """One answer, its task, and what of it there is so far.  Event loop's thread only.

    `attach` and `detach` count readers.  An unfinished answer without any is ended after some time.
    """

    def __init__(self, answer: Answer, admission: Callable[[], Awaitable[None]], claim: Claim | None, owner: SharedAnswers):
        self.id = answer.id
        self.claim = claim
        self.is_done = self.has_failed = False
        self.events = EventLog()
        self._answer = answer
        self._owner = owner
        self._whole: bytes | None = None
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._admission = asyncio.ensure_future(admission())
        self._task = asyncio.create_task(self._run(), name=f"answer {self.id}")

    @property
    def num_lanes(self) -> int:
        return self._answer.num_choices + 1

    @property
    def num_bytes(self) -> int:
        return self.events.num_bytes + len(self._whole or b"")

    def waiting_comment(self) -> str:
        return self._answer.waiting_comment()

    @property
    def is_stream(self) -> bool:
        return bool(self._answer.request.stream)

    # ---- readers ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        self._num_readers += 1
        self._stop_timer()

    def detach(self) -> None:
        self._num_readers -= 1
        if not self._num_readers:
            settings = self._owner.settings
            self._start_timer(settings.stream_keep_s if self.is_done else settings.stream_resume_timeout_s)

    def await_readers(self) -> None:
        """It is ended unless one comes in time."""
        self._num_readers += 1
        self.detach()

    @property
    def has_readers(self) -> bool:
        return self._num_readers > 0

    async def until_admitted(self) -> None:
        """Raises what the admission raised.  Whoever waits may be cancelled without harm to the others."""
        await asyncio.shield(self._admission)

    async def until_whole(self) -> bytes:
        """The body of a whole answer.  Raises as `until_admitted`, and what the answer failed with."""
        await asyncio.shield(self._task)
        assert self._whole is not None
        return self._whole

    def is_end(self, position: Position) -> bool:
        return position == self.events.end(self.num_lanes)

    def is_beyond(self, position: Position) -> bool:
        return any(map(gt, position, self.events.end(self.num_lanes)))

    # ---- the task ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await asyncio.shield(self._admission)
            if not self.is_stream:
                self._whole = encode(await self._answer.whole()).encode("ascii")
                return
            async for events in answer_events(self._answer):
                self.has_failed = self.has_failed or any(event.data.startswith('{"error"') for event in events)
                self.events.add(events)
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self._answer.abort()
            self._admission.cancel()  # nothing, unless this task was ended while it waited for it
            self.is_done = True
            self.events.close()
            self._owner.ended(self)
            if not self._num_readers:
                self._start_timer(self._owner.settings.stream_keep_s)

    def end(self) -> asyncio.Task[None]:
        """Stop computing it; readers get what there is."""
        self._stop_timer()
        self._task.cancel()
        return self._task

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._owner.drop, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SharedAnswers:
    """All of them, by id and by Idempotency-Key.  What is kept is bounded in bytes, in number and in time."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.find_earlier: Callable[[str], Awaitable[SharedAnswer | None]] | None = None  # of an earlier process
        self._by_id: OrderedDict[str, SharedAnswer] = OrderedDict()
        self._by_key: dict[str, SharedAnswer] = {}

    def begin(self, answer: Answer, admission: Callable[[], Awaitable[None]], claim: Claim | None) -> SharedAnswer:
        """Raises Overloaded if nothing more can be kept."""
        self._make_room()
        shared = SharedAnswer(answer, admission, claim, self)
        # Nobody may be left to hear what it failed with.
        shared._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        shared._admission.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._by_id[shared.id] = shared
        shared.await_readers()
        if claim is not None:
            self._by_key[claim.key] = shared
        return shared

    async def find(self, answer_id: str) -> SharedAnswer | None:
        shared = self._by_id.get(answer_id)
        if shared is None and self.find_earlier is not None:
            shared = await self.find_earlier(answer_id)
        return shared if shared is not None and shared.is_stream else None

    def known(self, answer_id: str) -> SharedAnswer | None:
        return self._by_id.get(answer_id)

    def find_claimed(self, claim: Claim) -> SharedAnswer | None:
        """The answer that was begun under this key; raises HttpError (409) if that was another request."""
        shared = self._by_key.get(claim.key)
        if shared is None or shared.claim is None:
            return None
        if shared.claim.digest != claim.digest:
            raise HttpError(
                409,
                "this Idempotency-Key came with another request before",
                param="Idempotency-Key",
                code="idempotency_conflict",
                headers=NO_RETRY,
            )
        return shared

    def ended(self, shared: SharedAnswer) -> None:
        """What failed is not given again under its key: a second try may succeed."""
        if shared.has_failed and shared.claim is not None and self._by_key.get(shared.claim.key) is shared:
            del self._by_key[shared.claim.key]

    def drop(self, shared: SharedAnswer) -> None:
        if self._by_id.pop(shared.id, None) is None:
            return
        if not shared.is_done:
            log.info("%s is ended: nobody came back for it", shared.id)
        if shared.claim is not None and self._by_key.get(shared.claim.key) is shared:
            del self._by_key[shared.claim.key]
        shared.end()

    async def close(self) -> None:
        shared, self._by_id = list(self._by_id.values()), OrderedDict()
        await asyncio.gather(*(each.end() for each in shared), return_exceptions=True)

    @property
    def num_bytes(self) -> int:
        return sum(shared.num_bytes for shared in self._by_id.values())

    def _make_room(self) -> None:
        """Drop the oldest that nobody reads and that are done, as far as needed."""
        limit = self.settings.stream_memory_bytes
        for shared in list(self._by_id.values()):
            if self.num_bytes < limit and len(self._by_id) < MAX_SHARED:
                return
            if shared.is_done and not shared.has_readers:
                self.drop(shared)
        if self.num_bytes >= limit or len(self._by_id) >= MAX_SHARED:
            raise Overloaded("as many resumable and idempotent answers are kept as memory is set aside for", retry_after_s=5.0)


class SharedStream(EventStream):
    """The response of one reader, who must have been attached; detached at the end, however that comes."""

    def __init__(
        self,
        shared: SharedAnswer,
        settings: ServerSettings,
        *,
        with_ids: bool = True,
        position: Position | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        blocks = shared.events.blocks(position or (0,) * shared.num_lanes, with_ids=with_ids)
        super().__init__(blocks, settings, shared.waiting_comment, is_bare=with_ids, headers=headers)
        self.shared = shared

    def release(self) -> None:
        self.shared.detach()
