"""The events of an answer that any number of readers take from wherever they stand.

An event's id is a position: how many events of each choice, and of what concerns all choices, its reader has had by then.  So ids
mean the same whatever order the choices' events came in, also when a restarted server computes the answer again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from pagestream.engine import InvalidRequest
from pagestream.server.sse import NO_LANE, Event, data_event

MAX_WRITE_BYTES = 1 << 16
EVENT_BYTES = 150  # what an event costs besides its text

Position = tuple[int, ...]  # events had, by lane


class EventLog:
    """Grows until it is closed.  Event loop's thread only."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_closed = False
        self._events: list[Event] = []
        self._waiting: set[asyncio.Event] = set()

    def add(self, events: Sequence[Event]) -> None:
        self._events += events
        self.num_bytes += sum(len(event.data) + EVENT_BYTES for event in events)
        self._tell()

    def close(self) -> None:
        self.is_closed = True
        self._tell()

    def end(self, num_lanes: int) -> Position:
        """The position of who has had all that there is."""
        counts = Counter(event.lane for event in self._events)
        return tuple(counts[lane] for lane in range(num_lanes))

    async def blocks(self, after: Position, *, with_ids: bool) -> AsyncIterator[bytes]:
        """The events after a position, those that are there in one piece, then the others as they come."""
        news = asyncio.Event()
        self._waiting.add(news)
        had = [0] * len(after)
        at = 0
        try:
            while True:
                block = bytearray()
                while at < len(self._events) and len(block) < MAX_WRITE_BYTES:
                    event = self._events[at]
                    at += 1
                    if event.lane == NO_LANE:
                        block += written(event, [])
                        continue
                    had[event.lane] += 1
                    if had[event.lane] > after[event.lane]:
                        block += written(event, list(map(max, had, after)) if with_ids else [])
                if block:
                    yield bytes(block)
                elif at == len(self._events):
                    if self.is_closed:
                        return
                    news.clear()
                    await news.wait()
        finally:
            self._waiting.discard(news)

    def _tell(self) -> None:
        for news in self._waiting:
            news.set()


def written(event: Event, position: Sequence[int]) -> bytes:
    """With the position as its id, if there is one."""
    head = f"id: {'.'.join(map(str, position))}\n".encode() if position else b""
    return head + data_event(event.data)


def position_of(last_event_id: str | None, num_lanes: int) -> Position:
    """Raises InvalidRequest for what can't be the id of an event of a stream with so many lanes."""
    if last_event_id is None or last_event_id == "":
        return (0,) * num_lanes
    parts = last_event_id.split(".")
    if len(parts) != num_lanes or not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts):
        raise InvalidRequest("Last-Event-ID names no event of this stream", param="Last-Event-ID")
    return tuple(map(int, parts))
