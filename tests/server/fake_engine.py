"""An engine without a model: the async engine's contract, with text that is a pure function of prompt, seed and position.

Tokens are the 256 bytes, an end of sequence, and pieces of text; some of those end within a character, so that text lags behind
tokens here as it does with a real vocabulary.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from pagestream.engine import (
    Begun,
    CompletionOutput,
    ContextLengthExceeded,
    EngineDead,
    EngineListener,
    Fault,
    FinishReason,
    InvalidRequest,
    Overloaded,
    Pooling,
    QueuePlace,
    RequestFailed,
    RequestOutput,
    RequestStats,
    SamplingParams,
    StepStats,
    TokenLogprobs,
    Usage,
)

EOS = 256
PIECES = [
    " the", " a", " lighthouse", " keeper", " saw", " rain", " on", " old", " copper", " roofs", " and",
    " walked", " home", " to",
    " bread", " chess", " glass", " moon", " winter", " wheat",
    ".", ",", "\n", " né", "京都", "👩‍👧", "\t", '"', "\\", "\u2028",
]  # fmt: skip
VOCAB_SIZE = 257 + len(PIECES)
BLOCK_SIZE = 16
NUM_BLOCKS = 4096


class FakeTokenizer:
    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"" if token_id == EOS else PIECES[token_id - 257].encode("utf-8")

    def token_text(self, token_id: int) -> str:
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """What each token adds to the text: nothing where it ends within a character, the whole character for its last part."""
        found, held = [], b""
        for token_id in token_ids:
            held += self.token_bytes(token_id)
            try:
                found.append(held.decode("utf-8"))
                held = b""
            except UnicodeDecodeError:
                found.append("")
        return tuple(found)


def draw(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


@dataclass
class Sequence_:
    """One of a request's answers, as far as it has come."""

    index: int
    num_tokens: int = 0
    pending: list[int] = field(default_factory=list)  # tokens decided, not yet emitted
    text: str = ""  # all of it, also what is held back
    num_sent: int = 0
    raw: bytes = b""
    finished: bool = False


class FakeStream:
    def __init__(
        self,
        engine: FakeEngine,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        fault: Fault | None,
        pooling: Pooling | None = None,
    ):
        self.engine, self.request_id, self.params, self.fault = engine, request_id, params, fault
        self.pooling = pooling
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        room = engine.max_model_len - len(prompt_token_ids)
        self.max_tokens = room if params.max_tokens is None else params.max_tokens
        self.seed = params.seed if params.seed is not None else time.monotonic_ns()
        self.sequences = [Sequence_(index) for index in range(params.n)]
        self.arrival_s, self.first_token_s, self.ended = time.monotonic(), None, False
        self.num_output_tokens = 0
        self.mailbox: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        item = await self.mailbox.get()
        if isinstance(item, RequestOutput):
            return item
        self.mailbox.put_nowait(item)
        raise item or StopAsyncIteration

    def abort(self) -> None:
        self.engine.end(self, FinishReason.ABORT, None)

    def keep_deltas(self, num_at_once: int = 1) -> None:
        """They are kept anyway."""

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), self.num_output_tokens, 0)

    # One step

    def step(self) -> None:
        if self.fault and self.num_output_tokens >= self.fault.at_token:
            self.engine.end(self, FinishReason.ERROR, RequestFailed(f"{self.request_id}: injected fault ({self.fault.kind})"))
            return
        is_first = self.first_token_s is None
        if is_first:
            self.first_token_s = time.monotonic()
            self.engine.listener_prompt(self)
        outputs = tuple(self.advance(sequence) for sequence in self.sequences if not sequence.finished)
        output = self.output(outputs)
        if is_first and self.params.prompt_logprobs is not None:
            ids = self.prompt_token_ids
            scores = (None, *(self.scores(token_id, at, self.params.prompt_logprobs) for at, token_id in enumerate(ids[1:], 1)))
            # In two halves, as a prompt that is computed in chunks gives them.
            texts, half = self.engine.tokenizer.texts(ids), len(ids) // 2
            self.mailbox.put_nowait(replace(self.output(()), prompt_logprobs=scores[:half], prompt_token_texts=texts[:half]))
            output = replace(output, prompt_logprobs=scores[half:], prompt_token_texts=texts[half:])
        is_done = all(sequence.finished for sequence in self.sequences)
        if self.pooling is not None:
            output = replace(output, embedding=self.embedding())
        self.mailbox.put_nowait(replace(output, finished=is_done))
        if is_done:
            reason = (
                FinishReason.STOP if any(output.finish_reason is FinishReason.STOP for output in outputs) else FinishReason.LENGTH
            )
            self.engine.end(self, reason, None)

    def output(self, outputs: tuple[CompletionOutput, ...]) -> RequestOutput:
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, usage=self.usage)

    def embedding(self) -> tuple[float, ...]:
        """Four numbers that float32 holds, of the prompt and the pooling."""
        return tuple((draw(self.prompt_token_ids, self.pooling, place) % 1000 - 500) / 1024 for place in range(4))

    def scores(self, token_id: int, position: int, num_top: int) -> TokenLogprobs:
        rivals = [token_id] + [97 + draw("rival", self.prompt_token_ids, position, k) % 26 for k in range(num_top * 3)]
        top = tuple((rival, -0.25 * (rank + 1) - position / 1000) for rank, rival in enumerate(dict.fromkeys(rivals)))[:num_top]
        return TokenLogprobs(token_id, -0.25 - position / 1000, 1, top)

    def next_token(self, sequence: Sequence_) -> int:
        params, at = self.params, sequence.num_tokens
        for token_id, bias in params.logit_bias:
            if bias >= 100:
                return token_id
        if not sequence.pending:
            key = ("greedy",) if params.is_greedy else ("seed", self.seed, sequence.index)
            token_id = 257 + draw(self.prompt_token_ids, at, *key) % len(PIECES)
            if len(PIECES[token_id - 257].encode()) > len(PIECES[token_id - 257]):  # byte by byte
                sequence.pending = list(PIECES[token_id - 257].encode())
            elif not params.ignore_eos and at >= params.min_tokens and draw("eos", self.prompt_token_ids, at, *key) % 40 == 0:
                return EOS
            else:
                sequence.pending = [token_id]
        return sequence.pending.pop(0)

    def advance(self, sequence: Sequence_) -> CompletionOutput:
        if self.max_tokens == 0:
            sequence.finished = True
            return CompletionOutput(sequence.index, finish_reason=FinishReason.LENGTH)
        token_id, position = self.next_token(sequence), len(self.prompt_token_ids) + sequence.num_tokens
        sequence.num_tokens += 1
        self.num_output_tokens += 1
        self.engine.listener_token(self)
        sequence.raw += self.engine.tokenizer.token_bytes(token_id)
        before = len(sequence.text)
        try:
            sequence.text += sequence.raw.decode("utf-8")
            sequence.raw = b""
        except UnicodeDecodeError:
            pass
        reason, stop_reason, end = self.verdict(sequence, token_id)
        token_text = sequence.text[before:]
        if reason is not None and sequence.raw:
            sequence.text += "\ufffd"
            end = len(sequence.text)
        sequence.finished = reason is not None
        text = sequence.text[sequence.num_sent : end]
        sequence.num_sent += len(text)
        logprobs = None if self.params.logprobs is None else (self.scores(token_id, position, self.params.logprobs),)
        texts = None if logprobs is None else (token_text,)
        return CompletionOutput(sequence.index, text, (token_id,), logprobs, texts, reason, stop_reason)

    def verdict(self, sequence: Sequence_, token_id: int) -> tuple[FinishReason | None, str | int | None, int]:
        """Why it ends now, by which stop, and up to where its text may be shown."""
        found = min(((at, stop) for stop in self.params.stop if (at := sequence.text.find(stop)) >= 0), default=None)
        if found is not None:
            at, stop = found
            return FinishReason.STOP, stop, at + (len(stop) if self.params.include_stop_str_in_output else 0)
        if token_id in self.params.stop_token_ids:
            return FinishReason.STOP, token_id, len(sequence.text)
        if token_id == EOS and not self.params.ignore_eos:
            return FinishReason.STOP, None, len(sequence.text)
        if sequence.num_tokens >= self.max_tokens:
            return FinishReason.LENGTH, None, len(sequence.text)
        held = max(
            (size for stop in self.params.stop for size in range(1, len(stop)) if sequence.text.endswith(stop[:size])), default=0
        )
        return None, None, len(sequence.text) - held


class FakeEngine:
    """`step_s` is how long a step takes; `max_num_seqs` and `max_num_queued` bound the requests that run and wait."""

    def __init__(
        self,
        listener: EngineListener | None = None,
        *,
        step_s: float = 0.001,
        max_num_seqs: int = 64,
        max_num_queued: int = 1024,
        context: int = 512,
        allows_faults: bool = True,
    ):
        self.tokenizer = FakeTokenizer()
        self.chat_template = "messages, tools"
        self.max_model_len = context
        self.allows_faults = allows_faults
        self.weights_summary = "no weights"
        self.kv_summary = f"KV cache: {NUM_BLOCKS * BLOCK_SIZE:,} tokens"
        self.cache_facts = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS)}
        self.step_s, self.max_num_seqs, self.max_num_queued = step_s, max_num_seqs, max_num_queued
        self.listener = listener
        self.streams: list[FakeStream] = []
        self.ended: list[tuple[str, FinishReason, int]] = []  # request id, why, tokens generated
        self.admission_s = 0.0
        self.num_asked = 0
        self.is_dead = self.is_draining = self.is_paused = False
        self.is_started = False
        self.stalled_s = 0.0
        self.task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.is_started and not self.is_draining and not self.is_dead

    async def start(self) -> None:
        self.is_started = True
        self.task = asyncio.create_task(self.loop())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
        for stream in list(self.streams):
            self.end(stream, FinishReason.ABORT, EngineDead("the engine was stopped"))

    async def drain(self, timeout_s: float) -> bool:
        self.is_draining = True
        end_s = time.monotonic() + timeout_s
        while self.streams and time.monotonic() < end_s:
            await asyncio.sleep(0.005)
        return not self.streams

    async def loop(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(self.step_s)
            running = [] if self.is_paused else self.streams[: self.max_num_seqs]
            for stream in running:
                stream.step()
            if self.listener and running:
                self.listener.step_done(self.stats())

    def die(self) -> None:
        self.is_dead = True
        for stream in list(self.streams):
            self.end(stream, FinishReason.ERROR, EngineDead("the engine has died"))

    def end(self, stream: FakeStream, reason: FinishReason, error: Exception | None) -> None:
        if stream.ended:
            return
        stream.ended = True
        stream.mailbox.put_nowait(error)
        self.streams.remove(stream)
        self.ended.append((stream.request_id, reason, stream.num_output_tokens))
        if self.listener:
            self.listener.request_finished(
                RequestStats(
                    stream.request_id,
                    reason,
                    len(stream.prompt_token_ids),
                    stream.num_output_tokens,
                    0,
                    stream.params.n,
                    stream.max_tokens,
                    stream.arrival_s,
                    stream.first_token_s,
                    stream.first_token_s,
                    time.monotonic(),
                )  # fmt: skip
            )

    def listener_prompt(self, stream: FakeStream) -> None:
        if self.listener:
            self.listener.prompt_computed(len(stream.prompt_token_ids), 0)
            self.listener.first_token(stream.first_token_s - stream.arrival_s)

    def listener_token(self, stream: FakeStream) -> None:
        if self.listener:
            self.listener.tokens_emitted(1, self.step_s)

    def stats(self) -> StepStats:
        running = self.streams[: self.max_num_seqs]
        blocks = sum(math.ceil((len(stream.prompt_token_ids) + stream.num_output_tokens) / BLOCK_SIZE) for stream in running)
        return StepStats(len(running), len(self.streams) - len(running), 0, blocks, NUM_BLOCKS, len(running))

    def render_chat(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict | None = None,
        tools: list[dict] | None = None,
    ) -> str:
        if any(message["content"] == "refuse me" for message in messages):
            raise InvalidRequest("the template refuses this conversation", param="messages")
        turns = "".join(f"<{message['role']}>{message['content']}" + "\n" for message in messages)
        return turns[:-1] if continue_final_message else turns + ("<assistant>" if add_generation_prompt else "")

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
    ) -> list[FakeStream]:
        self.num_asked += 1
        await asyncio.sleep(self.admission_s)
        if fault is not None and not self.allows_faults:
            raise InvalidRequest("x_fault needs a server started with --enable-fault-injection", param="x_fault")
        if self.is_dead:
            raise EngineDead("the engine has died")
        made = []
        self.refuse_beyond(0)
        names = [param] * len(prompts) if isinstance(param, str) else param
        for place, (prompt, param) in enumerate(zip(prompts, names, strict=True)):
            ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
            if truncate_prompt_tokens is not None:
                ids = ids[-truncate_prompt_tokens:]
            if any(token_id >= VOCAB_SIZE for token_id in ids):
                raise InvalidRequest(f"{param} holds a token id outside the vocabulary of {VOCAB_SIZE}", param=param)
            wanted = 1 if params.max_tokens is None else params.max_tokens
            if len(ids) + wanted > self.max_model_len:
                raise ContextLengthExceeded(param=param, num_tokens=len(ids), max_tokens=wanted, limit=self.max_model_len)
            text = prompt if isinstance(prompt, str) else None
            made.append(FakeStream(self, f"{request_id}-{place}", text, ids, params, fault, pooling))
        self.refuse_beyond(len(made))
        self.streams += made
        return made

    def refuse_while_full(self) -> None:
        if not self.is_dead:
            self.refuse_beyond(1)

    @property
    def num_places(self) -> int:
        return self.max_num_seqs + self.max_num_queued

    def num_admissible(self, num_requests: int) -> int:
        return max(0, min(num_requests, self.num_places - len(self.streams)))

    def refuse_beyond(self, num_requests: int) -> None:
        if self.is_draining:
            self.reject("draining", "the server is ending", 2.5)
        if len(self.streams) + num_requests > self.max_num_seqs + self.max_num_queued:
            self.reject("queue_full", "the queue is full", 0.2)

    def reject(self, reason: str, message: str, retry_after_s: float) -> None:
        if self.listener:
            self.listener.request_rejected(reason)
        raise Overloaded(message, retry_after_s=retry_after_s, draining=reason == "draining")

    def queue_place(self, request_id: str) -> QueuePlace | None:
        waiting = [stream.request_id.rpartition("-")[0] for stream in self.streams[self.max_num_seqs :]]
        return QueuePlace(waiting.index(request_id) + 1, 0.5) if request_id in waiting else None

    def abort(self, request_id: str) -> None:
        for stream in list(self.streams):
            if stream.request_id.startswith(request_id):
                stream.abort()
