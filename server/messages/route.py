"""The routes: a message, whole or streamed, and what its prompt would count."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.chat import prepare
from pagestream.server.generation import check_name
from pagestream.server.messages.answer import MessagesAnswer
from pagestream.server.messages.wire import CountTokensRequest, MessagesRequest
from pagestream.server.shaped import respond_as
from pagestream.server.state import server_state


async def create_message(http: Request) -> Response:
    request = await read_body(http, MessagesRequest)
    return await respond_as(http, MessagesAnswer, request, await asyncio.to_thread(request.as_chat), "messages")


async def count_tokens(http: Request) -> dict[str, int]:
    """The tokens of the very prompt that a message would get, its tools and its template included; nothing is generated."""
    state = server_state(http)
    asked = await read_body(http, CountTokensRequest)
    request = await asyncio.to_thread(asked.as_chat)
    check_name(http, request.model)
    _, prompt = await prepare(MessagesAnswer, request, state.engine, state.settings)
    tokens = await asyncio.to_thread(state.engine.tokenizer.encode, prompt, request.adds_special_tokens)
    return {"input_tokens": len(tokens)}
