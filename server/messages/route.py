"""The routes: a message, whole or streamed, and what its prompt would count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.chat import prepare, respond_as
from pagestream.server.generation import check_name
from pagestream.server.messages.answer import MessagesAnswer
from pagestream.server.messages.wire import CountTokensRequest, MessagesRequest
from pagestream.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


async def create_message(http: Request) -> Response:
    request = await read_body(http, MessagesRequest, http.app.state.settings.max_body_bytes)
    return await respond_as(http, MessagesAnswer, request, request.as_chat(), "messages")


async def count_tokens(http: Request) -> dict[str, int]:
    """The tokens of the very prompt that a message would get, its tools and its template included; nothing is generated."""
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    request = (await read_body(http, CountTokensRequest, settings.max_body_bytes)).as_chat()
    check_name(request.model, settings)
    _, prompt = await prepare(request, engine, settings)
    tokens = await asyncio.to_thread(engine.tokenizer.encode, prompt, request.adds_special_tokens)
    return {"input_tokens": len(tokens)}
