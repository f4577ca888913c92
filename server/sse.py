"""Server-sent events: what a stream says, its end, and what happens when it breaks or its reader leaves.

Events have ids only where the client asked for a stream that can be resumed (see event_log.py): official clients dispatch an event at
*every* blank line once they have seen one `id:` field, so that comments must then come without one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from pagestream.engine import EngineError
from pagestream.server.answer import Answer, encode
from pagestream.server.errors import ApiError, as_api_error
from pagestream.server.settings import ServerSettings

log = logging.getLogger(__name__)

DONE = "[DONE]"


class Event(NamedTuple):
    """What one event says.  `lane` is the choice it tells of, or their number for what concerns all of them."""

    lane: int
    data: str


def data_event(text: str) -> bytes:
    """One event.  The JSON is ASCII on one line, so that no reader's idea of a line break can split it."""
    return b"data: " + text.encode("ascii") + b"\n\n"


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
            send_timeout=settings.slow_reader_timeout_s or None,
            sep="\n",
        )

    def release(self) -> None:
        """Nobody reads it any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator alone: one that never started runs no `finally`.
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("a reader has taken nothing for %g s and is cut off", self.send_timeout)
        finally:
            self.release()


class AnswerStream(EventStream):
    """The response of a streamed answer; whatever ends it, the answer's sequences are aborted in the same moment."""

    def __init__(self, answer: Answer, settings: ServerSettings, events: AsyncIterator[bytes]):
        super().__init__(events, settings, answer.waiting_comment)
        self.answer = answer

    def release(self) -> None:
        self.answer.abort()


def keep_alive() -> Any:
    return ServerSentEvent(comment="keep-alive", sep="\n")
