"""One request's way out: a mailbox with one slot.  A slow reader finds one merged delta, never a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagestream.engine.core.errors import EngineError, RequestFailed
from pagestream.engine.core.outputs import RequestOutput, merge


class OutputStream:
    """Async iterator over a request's deltas, for one reader, on the event loop's thread.

    Ends after the delta that says `finished`.  Raises RequestFailed or EngineDead in place of the end where that is how the
    request ended.  Memory is bounded by the answer's own length.
    """

    def __init__(self, request_id: str, prompt_token_ids: tuple[int, ...], abort: Callable[[str], None]):
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._abort = abort
        self._slot: RequestOutput | None = None
        self._error: EngineError | None = None
        self._is_last = False  # nothing will be put any more
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._is_last:
            return
        self._slot = output if self._slot is None else merge(self._slot, output)
        if output.finished:
            self._is_last = True
            if output.error is not None:
                self._error = RequestFailed(output.error)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error; what is in the slot is still delivered."""
        if not self._is_last:
            self._error, self._is_last = error, True
            self._news.set()

    def abort(self) -> None:
        """The reader has left: end the request.  Synchronous, and nothing if it is finished."""
        if not self._is_last:
            self._is_last = True
            self._abort(self.request_id)

    @property
    def is_finished(self) -> bool:
        return self._is_last

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._slot is None:
            if self._error is not None:
                raise self._error
            if self._is_last:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output, self._slot = self._slot, None
        if output.error is not None and self._error is not None and not output.outputs:
            raise self._error
        return output
