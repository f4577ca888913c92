"""The step loop as a background task: many streams over one engine, none of which waits for another's reader."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from pagestream.engine.admission import AdmissionControl
from pagestream.engine.core.errors import DeadlineExceeded, EngineDead, InvalidRequest
from pagestream.engine.core.outputs import FinishReason, RequestOutput
from pagestream.engine.core.request import Begun, Fault, Pooling, Request
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.engine_args import EngineArgs
from pagestream.engine.factory import BuiltEngine, build_engine
from pagestream.engine.intake import RequestOptions
from pagestream.engine.live_view import EngineView, LiveView
from pagestream.engine.metrics import EngineListener, QueuePlace, RequestInfo, StepStats
from pagestream.engine.open_streams import OpenStreams
from pagestream.engine.output_stream import OutputStream
from pagestream.engine.text.chat_template import ChatTemplate
from pagestream.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AsyncLLMEngine:
    """Everything here runs on the event loop's thread but the steps and the tokenizing, which have threads of their own.

    The loop task awaits the step thread before it touches the engine again, so the engine's state needs no lock.  That thread
    goes on with the next step as long as nobody wants anything in between: the way there and back, past all that the event loop
    has to send after a step, takes a tenth of a small model's step.
    """

    def __init__(self, built: BuiltEngine):
        self._built = built
        self._engine = built.engine
        self._admission = AdmissionControl(built.engine, built.queue_limits)
        self._streams = OpenStreams(abort=self._abort_one, expire=self._expire)
        self._added: list[Request] = []
        self._aborted: list[str] = []
        self._expired: list[str] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="pagestream-step")
        self._text_threads = ThreadPoolExecutor(2, thread_name_prefix="pagestream-text")
        self._death: EngineDead | None = None
        self.on_outputs: Callable[[Sequence[RequestOutput]], None] | None = None  # hears of all, before any stream does
        self._progress_s: float | None = None  # when work came to an idle engine, or its last step ended; None: no work
        self._live = LiveView(built.engine)
        self._is_stopped = threading.Event()
        self._is_one_ahead = False  # the step thread has gone on before the last outputs reached their streams

    @classmethod
    def from_engine_args(cls, args: EngineArgs, listener: EngineListener | None = None) -> AsyncLLMEngine:
        """Load the model, size the cache, warm up.  Blocks; raises StartError."""
        return cls(build_engine(args.to_config(), listener))

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return self._engine.intake.limits.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._built.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The chat template's source; None for a model without one."""
        return self._chat_template.source

    @property
    def kv_summary(self) -> str:
        """One line: how many tokens and how many requests of full length the KV cache holds."""
        return self._built.kv_summary

    @property
    def weights_summary(self) -> str:
        """One line: how many weights, in how much memory, held as what."""
        return self._built.weights_summary

    @property
    def cache_facts(self) -> dict[str, str]:
        """How the KV cache was set up."""
        return self._built.cache_facts

    @property
    def is_ready(self) -> bool:
        return self._loop_task is not None and self._death is None and not self._admission.is_draining

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    @property
    def stalled_s(self) -> float:
        """How long no step has ended though there is work; 0 without any."""
        since_s = self._progress_s  # once, as this may be asked on any thread
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stats(self) -> StepStats:
        return self._engine.stats()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody looks on: steps are timed and counted for `live_view`."""
        self._live.open()
        try:
            yield
        finally:
            self._live.close()

    async def live_view(self) -> EngineView:
        """Every block and every request, between two steps: waits for the one in progress.  Raises EngineDead."""
        if self._death is not None:
            raise self._death
        return self._live.take() if self._progress_s is None else await self._live.at_next_step()

    def render_chat(self, messages: list[dict], **options: Any) -> str:
        """The prompt that the model's chat template makes of the messages.  Raises InvalidRequest."""
        return self._chat_template.render(messages, **options)

    @property
    def _chat_template(self) -> ChatTemplate:
        return self._built.chat_template

    # ---- life -------------------------------------------------------------------------------------------------------

    def populate_cache(self) -> None:
        """Take the cache's memory from the system now, in a quiet thread that ends with the engine: no step waits for it later."""

        def work() -> None:
            with suppress(OSError, AttributeError):  # not every system knows a thread's own priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self._built.populate_cache(self._is_stopped.is_set)

        # No daemon: the interpreter's end would tear it out of torch's code, which aborts the process.
        threading.Thread(target=work, name="pagestream-populate").start()

    async def start(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run(), name="pagestream-step-loop")

    async def stop(self) -> None:
        """End the loop after the step in progress; streams still open end with EngineDead."""
        self._is_stopped.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None
        self._die(EngineDead("the engine was stopped"))
        self._step_thread.shutdown(wait=True)
        self._text_threads.shutdown(wait=False, cancel_futures=True)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that run; returns whether all of them ended in time."""
        self._admission.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def add_requests(
        self,
        request_id: str,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        *,
        param: str | Sequence[str] = "prompt",
        priority: int = 0,
        cache_salt: str = "",
        fault: Fault | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        include_timeline: bool = False,
        timeout_s: float | None = None,
        begun: Sequence[Begun] = (),
        pooling: Pooling | None = None,
    ) -> list[OutputStream]:
        """Check all prompts and admit them all, or none: one stream each, in their order.

        `timeout_s` from now each of them ends with what it has and FinishReason.DEADLINE, wherever it is then: between two
        steps, or, where a step takes too long for that, for its reader alone; its blocks are then freed right after the step.
        `begun`, one per prompt, is what an earlier engine has made of them.  With `pooling` the last output of each has the
        prompt's embedding, and nothing is generated, whatever `params` say.
        Raises ClientError before anything is admitted (`param` is how the caller calls the prompts, or each of them), EngineDead after
        the end.
        """
        arrival_time_s = time.monotonic()
        options = RequestOptions(
            priority, cache_salt, fault, add_special_tokens, truncate_prompt_tokens, include_timeline, timeout_s, pooling=pooling
        )
        self._admission.check_fits(len(prompts), params.num_sequences, param if isinstance(param, str) else param[0].partition("[")[0])
        # What has something to give ends with that, however late it is.
        limit_s = None if any(each.output_token_ids or each.is_over for each in begun) else timeout_s
        self._check_open(len(prompts), params, limit_s)
        self._check_unused(request_id)

        def make() -> list[Request]:
            return [
                self._engine.intake.make_request(
                    f"{request_id}-{index}",
                    prompt,
                    params,
                    arrival_time_s=arrival_time_s,
                    options=replace(options, begun=begun[index]) if begun else options,
                    param=param if isinstance(param, str) else param[index],
                )
                for index, prompt in enumerate(prompts)
            ]

        making = asyncio.get_running_loop().run_in_executor(self._text_threads, make)
        try:
            # Not wait_for, which before Python 3.12 passes over a cancellation that comes just as the wait ends: whoever has left
            # would have requests that nobody aborts.
            async with asyncio.timeout(limit_s):
                requests = await making
        except TimeoutError:
            raise DeadlineExceeded(limit_s or 0.0) from None
        left_s = None if limit_s is None else limit_s - (time.monotonic() - arrival_time_s)
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(limit_s or 0.0)
        self._check_open(len(prompts), params, left_s)  # again: others may have come meanwhile
        self._check_unused(request_id)
        return [self._admit(request) for request in requests]

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Deltas of one request.  Leaving the iteration early aborts it."""
        (stream,) = await self.add_requests(request_id, [prompt], sampling_params)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    def abort(self, request_id: str) -> None:
        """End all requests that were added under this id, or one of them by its own.  Synchronous; takes effect between steps."""
        for known in [request_id, *self._streams.added_under(request_id)]:
            self._abort_one(known)

    def queue_place(self, request_id: str) -> QueuePlace | None:
        """Where those requests of this id stand that nothing has been computed of yet; None if there are none."""
        return self._admission.place(self._streams.added_under(request_id), self._added)

    def request_info(self, request_id: str) -> list[RequestInfo]:
        """Where the requests stand that were added under this id, one per prompt; for some time also after their end.

        Empty for an id that is not known (any more), or whose requests the loop has yet to take in.
        """
        found: list[RequestInfo] = []
        while (info := self._engine.request_info(f"{request_id}-{len(found)}")) is not None:
            found.append(info)
        return found

    def refuse_while_full(self) -> None:
        """Raises Overloaded where not even one more request of one sequence could be queued: known before anybody reads it.

        Nothing where the engine is dead: what it last held says nothing about its queue.
        """
        if self._death is None:
            self._admission.check(1, 1, self._added)

    @property
    def num_places(self) -> int:
        """How many requests of one sequence may run and wait."""
        return self._admission.num_places

    def num_admissible(self, num_requests: int) -> int:
        """How many of so many requests of one sequence each would come in now."""
        return self._admission.num_admissible(num_requests, self._added)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _check_open(self, num_requests: int, params: SamplingParams, time_left_s: float | None) -> None:
        if self._death is not None:
            raise self._death
        self._admission.check(num_requests, params.num_sequences, self._added, time_left_s)

    def _check_unused(self, request_id: str) -> None:
        if self._streams.added_under(request_id):
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")

    def _admit(self, request: Request) -> OutputStream:
        stream = self._streams.open(request)
        self._added.append(request)
        self._idle.clear()
        self._wake.set()
        return stream

    def _abort_one(self, request_id: str) -> None:
        if request_id in self._streams:
            self._aborted.append(request_id)
            self._wake.set()

    def _expire(self, request_id: str) -> None:
        self._expired.append(request_id)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._take_inbox()
                if not self._engine.has_unfinished_requests():
                    self._progress_s = None
                    self._admission.work_is_done()
                    self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._progress_s = self._progress_s or time.monotonic()
                self._admission.work_came()
                self._step_done(await loop.run_in_executor(self._step_thread, self._steps, loop))
                self._live.between_steps()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("the step loop has ended")
            self._die(error if isinstance(error, EngineDead) else EngineDead(f"the engine failed: {error}"))

    def _steps(self, loop: asyncio.AbstractEventLoop) -> list[RequestOutput]:
        """On the step thread: steps until somebody waits for their end.  Hands over the outputs of all and returns the last ones.

        A loop that is behind is waited for, so that no more than one step's outputs are ever on their way.
        """
        while True:
            outputs = self._engine.step()
            is_awaited = self._added or self._aborted or self._expired or self._live.is_asked or self._is_stopped.is_set()
            if is_awaited or self._is_one_ahead or not self._engine.has_unfinished_requests():
                return outputs
            self._is_one_ahead = True
            loop.call_soon_threadsafe(self._step_done, outputs)

    def _step_done(self, outputs: list[RequestOutput]) -> None:
        self._is_one_ahead = False
        if self._death is None:
            self._progress_s = time.monotonic()
            self._distribute(outputs)

    def _take_inbox(self) -> None:
        added, self._added = self._added, []
        for request in added:
            self._distribute(self._engine.admit(request))
        aborted, self._aborted = self._aborted, []
        expired, self._expired = self._expired, []
        self._distribute(self._engine.abort_request(aborted))
        self._distribute(self._engine.abort_request(expired, FinishReason.DEADLINE))

    def _distribute(self, outputs: list[RequestOutput]) -> None:
        if self.on_outputs is not None and outputs:
            self.on_outputs(self._streams.as_told(outputs))
        for _ in range(self._streams.put(outputs)):
            self._admission.finished()

    def _die(self, death: EngineDead) -> None:
        if self._death is None:
            self._death = death
        self._streams.fail(self._death)
        self._live.fail(self._death)
        self._idle.set()
