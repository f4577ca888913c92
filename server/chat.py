"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response

from pagestream.engine import CompletionOutput, SamplingParams
from pagestream.server.answer import Answer, Piece
from pagestream.server.conversation import ChatRequest
from pagestream.server.errors import in_words_of
from pagestream.server.generation import read_request, respond
from pagestream.server.logprobs import chat_logprobs
from pagestream.server.settings import ServerSettings
from pagestream.server.state import server_state
from pagestream.server.tools.plan import RESULT_ROLES, results_as_turns, shows_results
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
        make_reader: Callable[[], ReplyReader],
        make_counter: Callable[[], ReasoningCounter | None] = lambda: None,
    ):
        super().__init__(request, params)
        self._make_reader = make_reader
        self._counters = [make_counter() for _ in range(params.n)]
        self._readers: dict[int, ReplyReader] = {}  # of choices whose role was sent

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
        deltas = [as_delta(part) for part in parts_of(piece, reader)]
        if not deltas and (piece.tokens or piece.token_ids or piece.prompt_token_ids):
            deltas.append({"content": ""})
        logprobs = self.logprobs(piece) if piece.tokens else None
        for delta in deltas:
            choices.append(self.choice(piece, {"delta": delta}, logprobs, None))
            logprobs = None  # once, with the first
        if deltas:
            self.with_token_ids(choices[-1], piece)
        if piece.finish_reason is not None:
            choices.append(self.choice(piece, {"delta": {}}, None, finish_reason(piece, reader)))
        return choices

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        reader = self._make_reader()
        message = as_message(parts_of(piece, reader))
        logprobs = self.logprobs(piece) if self.request.logprobs else None
        choice = self.choice(piece, {"message": message}, logprobs, finish_reason(piece, reader))
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        return self.with_token_ids(choice, piece)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(piece.tokens, self.request.top_logprobs or 0, self.vocabulary)


def parts_of(piece: Piece, reader: ReplyReader) -> list[Part]:
    """The piece's text taken apart, and with the last piece all that was held back."""
    return reader.push(piece.text) + (reader.finish() if piece.finish_reason is not None else [])


def finish_reason(piece: Piece, reader: ReplyReader) -> str | None:
    """An answer that ended by itself and holds calls ended for them."""
    return "tool_calls" if piece.finish_reason == "stop" and reader.has_calls else piece.finish_reason


async def create_chat_completion(http: Request) -> Response:
    request = await read_request(http, ChatRequest)
    state = server_state(http)
    answer, prompt = await prepare(ChatAnswer, request, state.engine, state.settings)
    with in_words_of({} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        return await respond(http, answer, [prompt], "messages")


A = TypeVar("A", bound=ChatAnswer)


async def prepare(kind: type[A], request: ChatRequest, engine: AsyncLLMEngine, settings: ServerSettings) -> tuple[A, str]:
    """The answer to be, in the shape that was asked for, and its prompt.  Raises InvalidRequest."""

    def token_id_of(text: str) -> int | None:
        token_ids = engine.tokenizer.encode(text, False)
        return token_ids[0] if len(token_ids) == 1 else None

    def decode(token_ids: Sequence[int]) -> str:
        return engine.tokenizer.decode(token_ids, skip_special_tokens=False)

    def prepared() -> tuple[A, str]:
        plan = request.reply_plan(engine.chat_template, settings.parsers, token_id_of)
        params = request.sampling_params(plan)
        turns = [message.as_template_input() for message in request.messages]
        has_results = any(turn["role"] in RESULT_ROLES for turn in turns)
        if has_results and not plan.template_shows_calls and not shows_results(engine.render_chat):
            turns = results_as_turns(turns)
        prompt = engine.render_chat(**plan.prompt_arguments(turns), **request.template_arguments())
        return kind(request, params, lambda: plan.reader(prompt), lambda: plan.reasoning_counter(prompt, decode)), prompt

    # In a helper thread: neither a long conversation nor large schemas must hold the loop that everybody's streams run on.
    return await asyncio.to_thread(prepared)
