"""One request's way out: a mailbox with one slot.  A slow reader finds one merged delta, unless it asked for each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pagestream.engine.core.errors import EngineError, RequestFailed
from pagestream.engine.core.outputs import CompletionOutput, FinishReason, RequestOutput, Usage, merge
from pagestream.engine.core.request import Request


class OutputStream:
    """Async iterator over a request's deltas, for one reader, on the event loop's thread.

    Ends after the delta that says `finished`.  Raises RequestFailed or EngineDead in place of the end where that is how the
    request ended.  Memory is bounded by the answer's own length.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]):
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.seed = request.seed
        self._request = request
        self._usage = Usage(num_prompt_tokens=len(request.prompt_token_ids))
        self._ended: set[int] = set()  # answers that have a finish_reason
        self.cut_short: RequestOutput | None = None  # the last delta, where it was made here and not by the engine
        self._abort = abort
        self._slots: deque[RequestOutput] = deque()  # at most one, unless the reader wants each delta
        self._keeps_deltas = False
        self._num_at_once = 1  # so many deltas wake the reader
        self._error: EngineError | None = None
        self._is_last = False  # nothing will be put any more
        self._news = asyncio.Event()

    @property
    def usage(self) -> Usage:
        """Of all that was put, read or not."""
        return self._usage

    def keep_deltas(self, num_at_once: int = 1) -> None:
        """Deliver each delta as it was made, for a reader that keeps them all anyway and never dawdles.

        num_at_once: how many wait before they are delivered, unless the request ends: a reader in no hurry is woken less often.
        """
        self._keeps_deltas, self._num_at_once = True, num_at_once

    def put(self, output: RequestOutput) -> None:
        if self._is_last:
            return
        self._usage = output.usage
        for answer in output.outputs:
            if answer.finish_reason is not None:
                self._ended.add(answer.index)
        if self._slots and not self._keeps_deltas:
            output = merge(self._slots.pop(), output)
        self._slots.append(output)
        if output.finished:
            self._is_last = True
            if output.error is not None:
                self._error = RequestFailed(output.error)
        if self._is_last or len(self._slots) >= self._num_at_once:
            self._news.set()

    def expire(self) -> None:
        """End it at its deadline with what was put, without the engine: its step goes on, and nobody knows how long.

        What of the text the engine holds back is lost.
        """
        if self._is_last:
            return
        open_answers = [index for index in range(self._request.sampling_params.n) if index not in self._ended]
        self.cut_short = RequestOutput(
            self.request_id,
            self._request.prompt,
            self.prompt_token_ids,
            tuple(CompletionOutput(index, finish_reason=FinishReason.DEADLINE) for index in open_answers),
            finished=True,
            usage=self._usage,
        )
        self.put(self.cut_short)

    def fail(self, error: EngineError) -> None:
        """End the stream with an error; what was put before is still delivered."""
        if not self._is_last:
            self._error, self._is_last = error, True
            self._news.set()

    def abort(self) -> None:
        """The reader has left: end the request.  Synchronous, and nothing if it is finished.  Who reads on finds the end."""
        if not self._is_last:
            self._is_last = True
            self._abort(self.request_id)
            self._news.set()

    @property
    def is_finished(self) -> bool:
        return self._is_last

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._slots:
            if self._error is not None:
                raise self._error
            if self._is_last:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output = self._slots.popleft()
        if output.error is not None and self._error is not None and not output.outputs:
            raise self._error
        return output
