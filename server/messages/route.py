"""The route: a message, whole or streamed."""

from __future__ import annotations

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.chat import respond_as
from pagestream.server.messages.answer import MessagesAnswer
from pagestream.server.messages.wire import MessagesRequest


async def create_message(http: Request) -> Response:
    request = await read_body(http, MessagesRequest, http.app.state.settings.max_body_bytes)
    return await respond_as(http, MessagesAnswer, request, request.as_chat(), "messages")
