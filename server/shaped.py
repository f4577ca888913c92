"""Chat answers that another API asked for: read as chat requests, computed as those are, written as that API does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from fastapi import Request, Response

from pagestream.server.answer import Piece, encode
from pagestream.server.chat import ChatAnswer, prepare
from pagestream.server.conversation import ChatRequest
from pagestream.server.errors import ApiError, in_words_of
from pagestream.server.fields import WireModel
from pagestream.server.generation import check_name, introduce, refuse_idempotency, respond_alone
from pagestream.server.sse import broken_off
from pagestream.server.state import server_state
from pagestream.server.tools.reply import ReplyReader

NamedEvent = tuple[str, dict[str, Any]]  # an event's name, and what its data has besides


class ShapedAnswer(ChatAnswer):
    """One answer to one prompt, written as another API has it: events with names, or their fold."""

    is_journalled = False
    asked: Any  # the request in that API's shape
    names: ClassVar[Mapping[str, str]] = {}  # of a chat request's fields there

    @cached_property
    def reader(self) -> ReplyReader:
        return self._make_reader()

    @abstractmethod
    def opening(self) -> list[NamedEvent]:
        """Before anything is generated."""

    @abstractmethod
    def told(self, piece: Piece) -> Iterator[NamedEvent]:
        """What the answer gained, and with its last piece the end."""

    @abstractmethod
    def failure(self, error: ApiError) -> NamedEvent:
        """The end of a stream that can't be completed."""

    @abstractmethod
    def fold(self, events: list[NamedEvent]) -> dict[str, Any]:
        """The whole that all events of a complete stream add up to."""

    async def moments(self) -> AsyncIterator[list[NamedEvent]]:
        """The events of a stream, those of one moment together.  Raises EngineFault."""
        yield self.opening()
        async for pieces in self.pieces():
            if told := [event for piece in pieces for event in self.told(piece)]:
                yield told

    async def whole(self) -> dict[str, Any]:
        events: list[NamedEvent] = []
        try:
            async for told in self.moments():
                events += told
        finally:
            self.abort()
        return self.fold(events)

    async def events(self) -> AsyncIterator[bytes]:
        """The whole stream; also its failure is an event, the last one."""
        number = 0
        try:
            async for told in self.moments():
                yield b"".join([self.encoded(event, at) for at, event in enumerate(told, number)])
                number += len(told)
        except Exception as error:
            yield self.encoded(self.failure(broken_off(self, error)), number)

    def encoded(self, event: NamedEvent, number: int) -> bytes:
        """`number` is how many events came before it."""
        name, fields = event
        return f"event: {name}\ndata: {encode({'type': name, **fields})}\n\n".encode("ascii")


S = TypeVar("S", bound=ShapedAnswer)


async def respond_as(http: Request, kind: type[S], asked: WireModel, request: ChatRequest, param: str) -> Response:
    """The response to a request of another API, said as a chat request; `param` is the field that has the conversation there.

    Raises ClientError, EngineFault and ClientDisconnect.
    """
    state = server_state(http)
    refuse_idempotency(http)
    check_name(http, request.model)
    with in_words_of(kind.names):
        answer, prompt = await prepare(kind, request, state.engine, state.settings)
        answer.asked = asked
        introduce(http, answer)
        return await respond_alone(http, answer, [prompt], param, answer.events())
