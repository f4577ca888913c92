"""The engine's deltas to the choices of one answer.

A whole answer is the fold of what a stream would have sent, so the two can't differ.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pagestream.engine import (
    CompletionOutput,
    DeadlineExceeded,
    FinishReason,
    QueuePlace,
    RequestFailed,
    RequestOutput,
    RequestTimeline,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from pagestream.server.key_limits import Lease
from pagestream.server.logprobs import ScoredToken, Vocabulary, prompt_logprobs
from pagestream.server.protocol import GenerationRequest

if TYPE_CHECKING:
    from pagestream.engine import OutputStream

UNSOUND = (FinishReason.ABORT, FinishReason.ERROR)  # told as an error, never as a finish_reason

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Piece:
    """What one choice gained."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)  # where asked for
    prompt_token_ids: list[int] | None = None  # once, where asked for

    def is_empty(self) -> bool:
        return not (self.text or self.tokens or self.token_ids or self.finish_reason or self.prompt_logprobs is not None)


def fold_pieces(pieces: list[Piece]) -> Piece:
    last = pieces[-1]
    return Piece(
        last.index,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        prompt_token_ids=next((piece.prompt_token_ids for piece in pieces if piece.prompt_token_ids is not None), None),
    )


@dataclass(slots=True)
class PromptPart:
    """What a request asked to hear about its own prompt: told in one piece, before the answer, once all of it is there."""

    is_due: bool
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Answer(ABC):
    """One request's answer: choice i * n + j is the j-th to prompt i.  The two kinds differ in how a piece is written."""

    object_name: str  # of a whole answer
    chunk_name: str  # of a stream's chunks
    id_prefix: str
    is_journalled = True  # where there is a journal

    def __init__(self, request: GenerationRequest, params: SamplingParams):
        self.request = request
        self.params = params
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = request.model
        self.timeout_s = request.timeout_s  # None: no deadline
        self.take_lease: Callable[[], Lease] | None = None  # asks before admission whether its key may have it
        self.lease: Lease | None = None
        self.find_place: Callable[[], QueuePlace | None] = lambda: None
        self.streams: Sequence[OutputStream] = ()
        self._usages: list[Usage] = []
        self._timelines: list[RequestTimeline | None] = []
        self._prompt_parts: list[PromptPart] = []
        self._told_prompts: set[int] = set()  # choices whose prompt's token ids were sent, where asked for
        self._ends: list[int] = []  # of each choice's text so far, counting the text of all its tokens

    def begin(self, streams: Sequence[OutputStream], vocabulary: Vocabulary) -> None:
        """From here on the streams are this answer's, to be read and aborted."""
        self.streams = streams
        self.vocabulary = vocabulary
        self._usages = [Usage(num_prompt_tokens=len(stream.prompt_token_ids)) for stream in streams]
        self._timelines = [None for _ in streams]
        is_due = self.wants_echo or self.params.prompt_logprobs is not None
        self._prompt_parts = [PromptPart(is_due) for _ in streams]
        self._ends = [0] * (len(streams) * self.params.n)

    def waiting_comment(self) -> str:
        """What a stream without news has to say."""
        place = self.find_place()
        if place is None:
            return "keep-alive"
        return f"waiting, position {place.position}, about {place.wait_s:.1f} s"

    def abort(self) -> None:
        """Synchronous, so that it also works where an await would be cancelled; nothing happens to what has ended."""
        for stream in self.streams:
            stream.abort()
        if self.lease is not None:
            usages = [stream.usage for stream in self.streams]
            self.lease.give_back(sum(usage.num_prompt_tokens + usage.num_output_tokens for usage in usages))

    @property
    def num_choices(self) -> int:
        return len(self._ends)

    @property
    def wants_echo(self) -> bool:
        return False

    def prompt_text(self, output: RequestOutput) -> str:
        """Only asked where the prompt is echoed."""
        raise AssertionError("only completions echo")

    # Reading

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What each delta of the engine brings, as it comes.  Raises EngineFault where a request did not end well."""
        async for prompt_index, output in merged(self.streams):
            self._usages[prompt_index] = output.usage
            self._timelines[prompt_index] = output.timeline
            yield [*self._of_prompt(prompt_index, output), *(self._of_answer(prompt_index, new) for new in output.outputs)]
            if any(new.finish_reason in UNSOUND for new in output.outputs):
                raise RequestFailed(output.error or "the request was aborted")

    def _of_prompt(self, prompt_index: int, output: RequestOutput) -> Iterator[Piece]:
        part = self._prompt_parts[prompt_index]
        if not part.is_due:
            return
        part.scores += output.prompt_logprobs or ()
        part.texts += output.prompt_token_texts or ()
        if self.params.prompt_logprobs is not None and len(part.scores) < len(self.streams[prompt_index].prompt_token_ids):
            return
        part.is_due = False
        text = self.prompt_text(output) if self.wants_echo else ""
        tokens: list[ScoredToken] = []
        if self.wants_echo and self.params.logprobs is not None:
            # A begin-of-sequence token has a name but no place in the text: it counts backwards from the text's start.
            offsets = itertools.accumulate(map(len, part.texts), initial=len(text) - sum(map(len, part.texts)))
            tokens = [ScoredToken(*parts) for parts in zip(part.texts, (max(0, at) for at in offsets), part.scores, strict=False)]
        asked = self.request.prompt_logprobs
        scores = None if asked is None else prompt_logprobs(part.scores, asked, self.vocabulary)
        for index in range(prompt_index * self.params.n, (prompt_index + 1) * self.params.n):
            self._ends[index] = len(text)
            yield Piece(index, text, tokens, scores)

    def _of_answer(self, prompt_index: int, new: CompletionOutput) -> Piece:
        index = prompt_index * self.params.n + new.index
        piece = self._text_of(index, new)
        if self.request.return_token_ids:
            piece.token_ids = list(new.token_ids)
            if index not in self._told_prompts:
                self._told_prompts.add(index)
                piece.prompt_token_ids = list(self.streams[prompt_index].prompt_token_ids)
        return piece

    def _text_of(self, index: int, new: CompletionOutput) -> Piece:
        tokens = []
        if new.logprobs is not None:
            for text, scores in zip(new.token_texts or (), new.logprobs, strict=True):
                tokens.append(ScoredToken(text, self._ends[index], scores))
                self._ends[index] += len(text)
        if new.finish_reason is FinishReason.DEADLINE:
            # A limit of the answer like max_tokens: official clients know no further finish_reason.
            return Piece(index, new.text, tokens, None, FinishReason.LENGTH.value, FinishReason.DEADLINE.value)
        reason = None if new.finish_reason is None or new.finish_reason in UNSOUND else new.finish_reason.value
        return Piece(index, new.text, tokens, None, reason, new.stop_reason)

    # Writing

    @abstractmethod
    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices to be sent for a piece, one per chunk."""

    def with_token_ids(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """The choice, with the piece's token ids where the request asks for them."""
        if self.request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt_token_ids is not None:
                choice["prompt_token_ids"] = piece.prompt_token_ids
        return choice

    @abstractmethod
    def whole_choice(self, piece: Piece) -> dict[str, Any]: ...

    def head(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model, "system_fingerprint": None}

    def usage(self) -> dict[str, Any]:
        """So far; each prompt counts once, from the start, whatever n is."""
        num_prompt = sum(usage.num_prompt_tokens for usage in self._usages)
        num_output = sum(usage.num_output_tokens for usage in self._usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in self._usages)},
        }

    def timeline(self) -> dict[str, Any]:
        """Where it was asked for, one entry per prompt."""
        if not self.request.include_timeline:
            return {}
        return {"timeline": [None if timeline is None else asdict(timeline) for timeline in self._timelines]}

    async def whole(self) -> dict[str, Any]:
        found: dict[int, list[Piece]] = {}
        try:
            async for pieces in self.pieces():
                for piece in pieces:
                    found.setdefault(piece.index, []).append(piece)
        finally:
            self.abort()
        is_late = any(pieces[-1].stop_reason == FinishReason.DEADLINE.value for pieces in found.values())
        if is_late and self.timeout_s is not None and not any(usage.num_output_tokens for usage in self._usages):
            raise DeadlineExceeded(self.timeout_s)
        choices = [self.whole_choice(fold_pieces(found[index])) for index in sorted(found)]
        return {**self.head(self.object_name), "choices": choices, "usage": self.usage(), **self.timeline()}


async def merged(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of all streams as they come, each with its stream's place.

    At most one output of each is held here, so that what a slow reader leaves behind is merged in the streams.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(next_output(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                found = task.result()
                if found is not None:
                    yield place, found
                    waiting[asyncio.ensure_future(next_output(streams[place]))] = place
    finally:
        for task in waiting:
            task.cancel()


async def next_output(stream: OutputStream) -> RequestOutput | None:
    """None at the end, since an exception that ends iteration can't be a task's."""
    return await anext(stream, None)
