"""The route: a response, whole or streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.chat import prepare_as
from pagestream.server.errors import json_response
from pagestream.server.generation import admit, check_name, introduce, refuse_idempotency, while_connected
from pagestream.server.responses_api.answer import ResponseAnswer
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import AnswerStream

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


async def create_response(http: Request) -> Response:
    engine: AsyncLLMEngine = http.app.state.engine
    settings: ServerSettings = http.app.state.settings
    request = await read_body(http, ResponsesRequest, settings.max_body_bytes)
    refuse_idempotency(http)
    check_name(request.model, settings)
    answer, prompt = await prepare_as(ResponseAnswer, request.as_chat(), engine, settings)
    answer.asked = request
    introduce(http, settings, answer)
    if request.stream:
        await while_connected(http, admit(engine, answer, [prompt], "input"))
        return AnswerStream(answer, settings, answer.events())

    async def admitted_and_whole() -> dict[str, Any]:
        await admit(engine, answer, [prompt], "input")
        return await answer.whole_response()

    return json_response(await while_connected(http, admitted_and_whole()))
