"""From a checked request to its response: admission, then a stream or a whole answer; the same for completions and chat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from pagestream.engine import InvalidRequest
from pagestream.server.answer import Answer
from pagestream.server.errors import json_response
from pagestream.server.protocol import GenerationRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import AnswerStream

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

T = TypeVar("T")


def check_model(request: GenerationRequest, settings: ServerSettings) -> None:
    """Raises InvalidRequest (404) for a name that isn't served."""
    if request.model not in settings.served_model_names:
        raise unknown_model(request.model)


def unknown_model(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model {name[:100]!r} is not served here; GET /v1/models lists what is", param="model", code="model_not_found"
    )


async def respond(
    http: Request,
    engine: AsyncLLMEngine,
    settings: ServerSettings,
    answer: Answer,
    prompts: Sequence[str | list[int]],
    param: str,
) -> Response:
    """Admit all prompts or none, then answer.  Until admission every failure is a plain status; the client may leave at any time.

    `param` is the field that the prompts came from.  Raises ClientError, EngineFault and ClientDisconnect.
    """
    http.state.answer_id = answer.id
    request = answer.request
    if request.stream:
        await while_connected(http, admit(engine, answer, prompts, param))
        return AnswerStream(answer, settings.sse_keep_alive_interval_s)

    async def admitted_and_whole() -> dict[str, Any]:
        await admit(engine, answer, prompts, param)
        return await answer.whole()

    return json_response(await while_connected(http, admitted_and_whole()))


async def admit(engine: AsyncLLMEngine, answer: Answer, prompts: Sequence[str | list[int]], param: str) -> None:
    request = answer.request
    streams = await engine.add_requests(
        answer.id,
        prompts,
        answer.params,
        param=param,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        fault=request.fault(),
        add_special_tokens=request.adds_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        include_timeline=bool(request.include_timeline),
    )
    answer.begin(streams, engine.tokenizer)


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises ClientDisconnect, with the work cancelled, as soon as the client has left.

    Call it after the body was read: what is received from then on can only be the end of the connection.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
