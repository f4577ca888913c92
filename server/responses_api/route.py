"""The route: a response, whole or streamed."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response

from pagestream.server.body import read_body
from pagestream.server.responses_api.answer import ResponseAnswer
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.shaped import respond_as


async def create_response(http: Request) -> Response:
    request = await read_body(http, ResponsesRequest)
    return await respond_as(http, ResponseAnswer, request, await asyncio.to_thread(request.as_chat), "input")
