"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from pagestream.server.answer import Answer, Piece
from pagestream.server.body import read_body
from pagestream.server.generation import check_model, respond
from pagestream.server.logprobs import chat_logprobs
from pagestream.server.protocol import ChatRequest
from pagestream.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    request: ChatRequest

    def __init__(self, request: ChatRequest, model: str):
        super().__init__(request, request.sampling_params(), model)
        self._begun: set[int] = set()  # choices whose role was sent

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
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            choices.append(self.choice(piece, {"delta": {"role": "assistant", "content": ""}}, None, None))
            if piece.prompt_logprobs is not None:
                choices[0]["prompt_logprobs"] = piece.prompt_logprobs
        if piece.text or piece.tokens:
            choices.append(
                self.choice(piece, {"delta": {"content": piece.text}}, self.logprobs(piece) if piece.tokens else None, None)
            )
        if piece.finish_reason is not None:
            choices.append(self.choice(piece, {"delta": {}}, None, piece.finish_reason))
        return choices

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice = self.choice(
            piece, {"message": message}, self.logprobs(piece) if self.request.logprobs else None, piece.finish_reason
        )
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        return choice

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(piece.tokens, self.request.top_logprobs or 0, self.vocabulary)


async def create_chat_completion(http: Request) -> Response:
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    request = await read_body(http, ChatRequest, settings.max_body_bytes)
    check_model(request, settings)
    answer = ChatAnswer(request, request.model)
    messages = [message.as_template_input() for message in request.messages]
    # In a helper thread: a long conversation must not hold the loop that everybody's streams run on.
    prompt = await asyncio.to_thread(engine.render_chat, messages, **request.template_arguments())
    return await respond(http, engine, settings, answer, [prompt], "messages")
