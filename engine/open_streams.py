"""The streams of the requests that have not ended, by the requests' ids, with what ends each at its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pagestream.engine.core.errors import EngineDead
from pagestream.engine.core.outputs import RequestOutput
from pagestream.engine.core.request import Request
from pagestream.engine.output_stream import OutputStream

DEADLINE_GRACE_S = 0.25  # what a step in progress may still take at a deadline, so that nothing of the answer is lost


class OpenStreams:
    """A request is in here from its admission to its last output.  Event loop's thread only.

    `abort` is called with the id of a request whose reader has left, `expire` with one whose time is over.
    """

    def __init__(self, *, abort: Callable[[str], None], expire: Callable[[str], None]):
        self._abort = abort
        self._tell_expired = expire
        self._streams: dict[str, OutputStream] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def num_deadlines(self) -> int:
        return len(self._deadlines)

    def added_under(self, request_id: str) -> list[str]:
        """The ids of those requests that were added together under this one."""
        return [known for known in self._streams if known.rpartition("-")[0] == request_id]

    def open(self, request: Request) -> OutputStream:
        request_id = request.request_id
        stream = self._streams[request_id] = OutputStream(request, self._abort)
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
            self._deadlines[request_id] = asyncio.get_running_loop().call_later(left_s, self._expire, request_id)
        return stream

    def _expire(self, request_id: str) -> None:
        """Let the request end between two steps, with all its text; its stream ends soon even if this step does not."""
        self._tell_expired(request_id)
        if stream := self._streams.get(request_id):
            self._deadlines[request_id] = asyncio.get_running_loop().call_later(DEADLINE_GRACE_S, stream.expire)

    def as_told(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """What the streams tell of these: of a request that was cut short nothing but the end it has had."""
        told = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.cut_short is None:
                told.append(output)
            elif output.finished:
                told.append(stream.cut_short)
        return told

    def put(self, outputs: Sequence[RequestOutput]) -> int:
        """Hand each output to its stream; returns how many requests have ended with that."""
        num_ended = 0
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
            if output.finished:
                num_ended += 1
                self._streams.pop(output.request_id, None)
                if timer := self._deadlines.pop(output.request_id, None):
                    timer.cancel()
        return num_ended

    def fail(self, death: EngineDead) -> None:
        """End all of them."""
        for timer in self._deadlines.values():
            timer.cancel()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(death)
