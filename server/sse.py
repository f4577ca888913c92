"""Server-sent events: the bytes of a stream, its end, and what happens when it breaks or its reader leaves.

No event has an id, so a keep-alive comment can stand anywhere: official clients dispatch an event at *every* blank line once they
have seen one `id:` field.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from pagestream.engine import EngineError
from pagestream.server.answer import Answer, encode
from pagestream.server.errors import as_api_error

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def data_event(text: str) -> bytes:
    """One event.  The JSON is ASCII on one line, so that no reader's idea of a line break can split it."""
    return b"data: " + text.encode("ascii") + b"\n\n"


async def answer_events(answer: Answer) -> AsyncIterator[bytes]:
    """The whole stream: chunks, the usage where asked for, [DONE].

    A failure can no longer change the status: it becomes one event with the error envelope, and no finish_reason is made up.
    """
    head = encode(answer.head(answer.chunk_name))[:-1]
    wants_usage, is_running = answer.request.wants_usage, answer.request.wants_running_usage
    tail = ',"usage":null}' if wants_usage else "}"
    try:
        async for pieces in answer.pieces():
            if is_running:
                tail = f',"usage":{encode(answer.usage())}}}'
            choices = [choice for piece in pieces if not piece.is_empty() for choice in answer.chunk_choices(piece)]
            if choices:
                # Of one moment, so in one write: a step that moves n answers costs one wake-up of the client.
                yield b"".join([data_event(f'{head},"choices":[{encode(choice)}]{tail}') for choice in choices])
        last = {**({"usage": answer.usage()} if wants_usage else {}), **answer.timeline()}
        if last:
            yield data_event(f'{head},"choices":[],{encode(last)[1:]}')
    except Exception as error:
        answer.abort()  # at once: what else this request asked for must not run on while a slow reader takes the news
        log.error("%s failed in its stream: %s", answer.id, error, exc_info=not isinstance(error, EngineError))
        yield data_event(encode(as_api_error(error).envelope()))
    yield DONE


class AnswerStream(EventSourceResponse):
    """The response of a streamed answer; whatever ends it, the answer's sequences are aborted in the same moment."""

    def __init__(self, answer: Answer, keep_alive_interval_s: float):
        super().__init__(
            answer_events(answer),
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            ping=keep_alive_interval_s,
            ping_message_factory=keep_alive,
            sep="\n",
        )
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator alone: one that never started runs no `finally`.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.abort()


def keep_alive() -> Any:
    return ServerSentEvent(comment="keep-alive", sep="\n")
