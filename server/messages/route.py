"""The route: a message, whole or streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.chat import prepare_as
from pagestream.server.errors import json_response
from pagestream.server.generation import admit, check_name, introduce, refuse_idempotency, while_connected
from pagestream.server.messages.answer import MessagesAnswer
from pagestream.server.messages.wire import MessagesRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import AnswerStream

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


async def create_message(http: Request) -> Response:
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    request = await read_body(http, MessagesRequest, settings.max_body_bytes)
    refuse_idempotency(http)
    check_name(request.model, settings)
    answer, prompt = await prepare_as(MessagesAnswer, request.as_chat(), engine, settings)
    introduce(http, settings, answer)
    if request.stream:
        await while_connected(http, admit(engine, answer, [prompt], "messages"))
        return AnswerStream(answer, settings, answer.events())

    async def admitted_and_whole() -> dict[str, Any]:
        await admit(engine, answer, [prompt], "messages")
        return await answer.whole_message()

    return json_response(await while_connected(http, admitted_and_whole()))
