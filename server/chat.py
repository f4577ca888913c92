"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fastapi import Request, Response

from pagestream.engine import CompletionOutput, InvalidRequest, SamplingParams
from pagestream.server.answer import Answer, Piece
from pagestream.server.body import read_body
from pagestream.server.errors import json_response
from pagestream.server.fields import WireModel
from pagestream.server.generation import (
    admit,
    admitted_and_whole,
    check_name,
    introduce,
    refuse_idempotency,
    respond,
    while_connected,
)
from pagestream.server.logprobs import chat_logprobs
from pagestream.server.protocol import ChatRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import AnswerStream
from pagestream.server.tools.reasoning_count import ReasoningCounter
from pagestream.server.tools.reply import Part, ReplyReader, as_delta, as_message

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    request: ChatRequest

    def __init__(
        self,
        request: ChatRequest,
        params: SamplingParams,
        make_reader: Callable[[], ReplyReader | None],
        make_counter: Callable[[], ReasoningCounter | None] = lambda: None,
    ):
        super().__init__(request, params, request.model)
        self._make_reader = make_reader
        self._counters = [make_counter() for _ in range(params.n)]
        self._readers: dict[int, ReplyReader | None] = {}  # of choices whose role was sent

    def _of_answer(self, prompt_index: int, new: CompletionOutput) -> Piece:
        counter = self._counters[new.index]
        if counter is not None:
            counter.push(new.token_ids)
        return super()._of_answer(prompt_index, new)

    def usage(self) -> dict[str, Any]:
        num_reasoning = sum(counter.num_tokens for counter in self._counters if counter is not None)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    def choice(
        self, piece: Piece, content: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The role once, first; the end in a chunk of its own, since some clients read no content beside a finish_reason."""
        choices = []
        if piece.index not in self._readers:
            self._readers[piece.index] = self._make_reader()
            choices.append(self.choice(piece, {"delta": {"role": "assistant", "content": ""}}, None, None))
            if piece.prompt_logprobs is not None:
                choices[0]["prompt_logprobs"] = piece.prompt_logprobs
        reader = self._readers[piece.index]
        deltas = self.deltas(piece, reader)
        logprobs = self.logprobs(piece) if piece.tokens else None
        for delta in deltas:
            choices.append(self.choice(piece, {"delta": delta}, logprobs, None))
            logprobs = None  # once, with the first
        if deltas:
            self.with_token_ids(choices[-1], piece)
        if piece.finish_reason is not None:
            choices.append(self.choice(piece, {"delta": {}}, None, finish_reason(piece, reader)))
        return choices

    def deltas(self, piece: Piece, reader: ReplyReader | None) -> list[dict[str, Any]]:
        if reader is None:
            return [{"content": piece.text}] if piece.text or piece.tokens or piece.token_ids else []
        parts = reader.push(piece.text)
        if piece.finish_reason is not None:
            parts += reader.finish()
        return [as_delta(part) for part in parts] or ([{"content": ""}] if piece.tokens or piece.token_ids else [])

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        reader = self._make_reader()
        if reader is None:
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            message = as_message(reader.push(piece.text) + reader.finish())
        logprobs = self.logprobs(piece) if self.request.logprobs else None
        choice = self.choice(piece, {"message": message}, logprobs, finish_reason(piece, reader))
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        return self.with_token_ids(choice, piece)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(piece.tokens, self.request.top_logprobs or 0, self.vocabulary)


def finish_reason(piece: Piece, reader: ReplyReader | None) -> str | None:
    """An answer that ended by itself and holds calls ended for them."""
    return "tool_calls" if piece.finish_reason == "stop" and reader is not None and reader.has_calls else piece.finish_reason


async def create_chat_completion(http: Request) -> Response:
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    request = await read_body(http, ChatRequest, settings.max_body_bytes)
    check_name(request.model, settings)
    answer, prompt = await prepare(request, engine, settings)
    return await respond(http, engine, settings, answer, [prompt], "messages")


async def prepare(request: ChatRequest, engine: AsyncLLMEngine, settings: ServerSettings) -> tuple[ChatAnswer, str]:
    """The answer to be, and its prompt.  Raises InvalidRequest."""
    return await prepare_as(ChatAnswer, request, engine, settings)


A = TypeVar("A", bound=ChatAnswer)


async def prepare_as(kind: type[A], request: ChatRequest, engine: AsyncLLMEngine, settings: ServerSettings) -> tuple[A, str]:
    """The same for an answer that is written in another shape."""

    def token_id_of(text: str) -> int | None:
        token_ids = engine.tokenizer.encode(text, False)
        return token_ids[0] if len(token_ids) == 1 else None

    plan = request.reply_plan(engine.chat_template, settings.parsers, token_id_of)
    params = request.sampling_params(plan)
    messages = plan.prompt_arguments([message.as_template_input() for message in request.messages])
    # In a helper thread: a long conversation must not hold the loop that everybody's streams run on.
    prompt = await asyncio.to_thread(engine.render_chat, **messages, **request.template_arguments())

    def decode(token_ids: Sequence[int]) -> str:
        return engine.tokenizer.decode(token_ids, skip_special_tokens=False)

    return kind(request, params, lambda: plan.reader(prompt), lambda: plan.reasoning_counter(prompt, decode)), prompt


class ShapedAnswer(ChatAnswer):
    """A chat answer that another API asked for and whose whole and stream are written as that API does."""

    asked: Any  # the request in that API's shape
    names: ClassVar[Mapping[str, str]] = {}  # of a chat request's fields there

    def parts(self, piece: Piece, reader: ReplyReader | None) -> list[Part]:
        if reader is None:
            return [Part("content", piece.text)] if piece.text else []
        return reader.push(piece.text) + (reader.finish() if piece.finish_reason is not None else [])

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """The whole stream; also its failure is an event."""


S = TypeVar("S", bound=ShapedAnswer)


async def respond_as(http: Request, kind: type[S], asked: WireModel, request: ChatRequest, param: str) -> Response:
    """The response to a request of another API, said as a chat request; `param` is the field that has the conversation there.

    Raises ClientError, EngineFault and ClientDisconnect.
    """
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    refuse_idempotency(http)
    check_name(request.model, settings)
    try:
        answer, prompt = await prepare_as(kind, request, engine, settings)
        answer.asked = asked
        introduce(http, settings, answer)
        if request.stream:
            await while_connected(http, admit(engine, answer, [prompt], param))
            return AnswerStream(answer, settings, answer.events())
        return json_response(await while_connected(http, admitted_and_whole(engine, answer, [prompt], param)))
    except InvalidRequest as error:
        field = error.param or ""
        if field not in kind.names:
            raise
        name = kind.names[field]
        raise InvalidRequest(error.message.replace(field, name, 1), param=name, code=error.code) from None
