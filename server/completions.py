"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from pagestream.engine import RequestOutput
from pagestream.server.answer import Answer, Piece
from pagestream.server.generation import read_request, respond
from pagestream.server.logprobs import completion_logprobs
from pagestream.server.protocol import CompletionRequest
from pagestream.server.state import server_state

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


class CompletionAnswer(Answer):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"
    request: CompletionRequest

    def __init__(self, request: CompletionRequest, engine: AsyncLLMEngine):
        super().__init__(request, request.sampling_params())
        self.engine = engine

    @property
    def wants_echo(self) -> bool:
        return bool(self.request.echo)

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def choice(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        return self.with_token_ids(choice, piece)

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece, self.logprobs(piece) if piece.tokens else None)]

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self.choice(piece, None if self.request.logprobs is None else self.logprobs(piece))

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return completion_logprobs(piece.tokens, self.request.logprobs or 0, self.vocabulary)


async def create_completion(http: Request) -> Response:
    request = await read_request(http, CompletionRequest)
    return await respond(http, CompletionAnswer(request, server_state(http).engine), request.prompt, "prompt")
