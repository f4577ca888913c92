"""POST /tokenize and /detokenize: the served model's own tokenizer, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from fastapi import Request
from pydantic import Field, model_validator

from pagestream.engine import InvalidRequest
from pagestream.server.body import check
from pagestream.server.chat import ChatAnswer, prepare
from pagestream.server.conversation import ChatRequest, Message
from pagestream.server.fields import Count, Flag, ModelRequest, Several, Text
from pagestream.server.generation import read_request
from pagestream.server.state import server_state
from pagestream.server.tools.wire import MAX_TOOLS, Tool

OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRequest(ModelRequest):
    """A prompt, or the messages of a conversation as the model's template shows them."""

    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: Flag | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: Flag | None = Field(None, description="Only with messages, as all below but the last; as in chat.")
    continue_final_message: Flag | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    return_token_strs: Flag | None = False

    @model_validator(mode="after")
    def check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
        for name in OF_MESSAGES:
            if self.messages is None and getattr(self, name):
                raise InvalidRequest(f"{name} is only allowed with messages", param=name)
        return self

    def as_chat(self) -> ChatRequest:
        """Raises InvalidRequest."""
        return check(ChatRequest, self.model_dump(include={"model", "messages", *OF_MESSAGES}, exclude_unset=True))


class DetokenizeRequest(ModelRequest):
    tokens: Several[Count]


async def tokenize(http: Request) -> dict[str, Any]:
    request = await read_request(http, TokenizeRequest)
    state = server_state(http)
    engine, text = state.engine, request.prompt
    if request.messages is not None:
        _, text = await prepare(ChatAnswer, await asyncio.to_thread(request.as_chat), engine, state.settings)

    def encode() -> dict[str, Any]:
        default = request.messages is None
        adds = default if request.add_special_tokens is None else request.add_special_tokens
        tokens = engine.tokenizer.encode(text or "", adds)
        names = [engine.tokenizer.token_text(token_id) for token_id in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": names}

    return await asyncio.to_thread(encode)


async def detokenize(http: Request) -> dict[str, Any]:
    request = await read_request(http, DetokenizeRequest)
    tokenizer = server_state(http).engine.tokenizer
    size = tokenizer.vocab_size
    if any(token_id >= size for token_id in request.tokens):
        raise InvalidRequest(f"tokens holds an id outside the vocabulary, whose ids go from 0 to {size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    return {"prompt": text}
