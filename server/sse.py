"""Server-sent events: what a stream says, its end, and what happens when it breaks or its reader leaves.

Events have ids only where the client asked for a stream that can be resumed (see event_log.py): official clients dispatch an event at
*every* blank line once they have seen one `id:` field, so that comments must then come without one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from pagestream.engine import EngineDead, EngineError
from pagestream.server.answer import Answer, encode
from pagestream.server.errors import ApiError, as_api_error
from pagestream.server.settings import ServerSettings

log = logging.getLogger(__name__)

DONE = "[DONE]"
NO_LANE = -1


class Event(NamedTuple):
    """What one event says.  `lane` is the choice it tells of, or their number for what concerns all of them.

    With NO_LANE it is no part of the answer, and has no place in it.
    """

    lane: int
    data: str


def data_event(text: str) -> bytes:
    """One event.  The JSON is ASCII on one line, so that no reader's idea of a line break can split it."""
    return b"data: " + text.encode("ascii") + b"\n\n"


LAST_BYTES = data_event(DONE)


async def answer_events(answer: Answer) -> AsyncIterator[list[Event]]:
    """The whole stream: chunks, the usage where asked for, [DONE].  Those of one moment come together.

    A failure can no longer change the status: it becomes one event with the error envelope, and no finish_reason is made up.
    """
    head = encode(answer.head(answer.chunk_name))[:-1]
    wants_usage, is_running = answer.request.wants_usage, answer.request.wants_running_usage
    tail = ',"usage":null}' if wants_usage else "}"
    last_lane = answer.num_choices
    try:
        async for pieces in answer.pieces():
            if is_running:
                tail = f',"usage":{encode(answer.usage())}}}'
            choices = [choice for piece in pieces if not piece.is_empty() for choice in answer.chunk_choices(piece)]
            if choices:
                yield [Event(choice["index"], f'{head},"choices":[{encode(choice)}]{tail}') for choice in choices]
        last = {**({"usage": answer.usage()} if wants_usage else {}), **answer.timeline()}
        if last:
            yield [Event(last_lane, f'{head},"choices":[],{encode(last)[1:]}')]
    except Exception as error:
        if isinstance(error, EngineDead):
            last_lane = NO_LANE  # a later engine may go on with the answer, and end it otherwise
        yield [Event(last_lane, encode(broken_off(answer, error).envelope()))]
    yield [Event(last_lane, DONE)]


def broken_off(answer: Answer, error: Exception) -> ApiError:
    """End an answer whose stream has failed; returns what its reader is to be told."""
    answer.abort()  # at once: what else this request asked for must not run on while a slow reader takes the news
    log.error("%s failed in its stream: %s", answer.id, error, exc_info=not isinstance(error, EngineError))
    return as_api_error(error)


async def answer_bytes(answer: Answer) -> AsyncIterator[bytes]:
    """The stream without ids.  What is of one moment goes in one write: a step that moves n answers wakes the client once."""
    async for events in answer_events(answer):
        yield b"".join([data_event(event.data) for event in events])


class WatchedSend:
    """What a response sends with.  Once that has waited for `timeout_s`, the `async with` around it ends with TimeoutError.

    One timer that looks now and then costs less than a time limit for each event, which was a quarter of all that an event costs.
    """

    def __init__(self, send: Send, timeout_s: float):
        self._send = send
        self._timeout_s = timeout_s
        self._limit = asyncio.timeout(None)
        self._num_waiting = 0  # an event and a ping can wait at the same time, and then for the same
        self._since_s = 0.0

    async def __call__(self, message: Message) -> None:
        if self._num_waiting == 0:
            self._since_s = self._loop.time()
        self._num_waiting += 1
        try:
            await self._send(message)
        finally:
            self._num_waiting -= 1

    async def __aenter__(self) -> WatchedSend:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self._look()
        return self

    @property
    def is_over(self) -> bool:
        """Whether the time was what ended it."""
        return self._limit.expired()

    async def __aexit__(self, *raised: Any) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(*raised)

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (self._since_s if self._num_waiting else now_s) + self._timeout_s
        if now_s >= due_s:
            self._limit.reschedule(now_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)


class EventStream(EventSourceResponse):
    """A response of events.  A reader who takes nothing for `slow_reader_timeout_s` is cut off; `release` is called at the end."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        settings: ServerSettings,
        comment: Callable[[], str],
        *,
        is_bare: bool = False,
        headers: Mapping[str, str] | None = None,
    ):
        def ping() -> Any:
            # Bare: without the blank line, at which an official client that has seen an id would expect an event.
            return f": {comment()}\n{'' if is_bare else chr(10)}".encode("ascii")

        super().__init__(
            events,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
            ping=settings.sse_keep_alive_interval_s,
            ping_message_factory=ping,
            sep="\n",
        )
        self._is_done = False
        self._slow_reader_timeout_s = settings.slow_reader_timeout_s or math.inf

    def release(self) -> None:
        """Nobody reads it any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator alone: one that never started runs no `finally`.
        watched = WatchedSend(send, self._slow_reader_timeout_s)
        try:
            async with watched:
                await super().__call__(scope, receive, watched)
        except TimeoutError:
            if not watched.is_over:
                raise
            log.info("a reader has taken nothing for %g s and is cut off", self._slow_reader_timeout_s)
        finally:
            self.release()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """What sse-starlette does where it has no `send_timeout`, but for the cancel scope around each event.

        Nothing follows [DONE], no ping either that comes due right behind it.
        """
        if not self._is_done:
            self._is_done = message["body"].endswith(LAST_BYTES)
            await send(message)


class AnswerStream(EventStream):
    """The response of a streamed answer; whatever ends it, the answer's sequences are aborted in the same moment."""

    def __init__(self, answer: Answer, settings: ServerSettings, events: AsyncIterator[bytes]):
        super().__init__(events, settings, answer.waiting_comment)
        self.answer = answer

    def release(self) -> None:
        self.answer.abort()


def keep_alive() -> Any:
    return ServerSentEvent(comment="keep-alive", sep="\n")
