"""GET /v1/requests/{id}: where a request stands and what happened to it, while it runs and for some time after its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request

from pagestream.engine import InvalidRequest, RequestInfo
from pagestream.server import responses
from pagestream.server.openapi import describe_errors

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


def state_of(info: RequestInfo) -> dict[str, Any]:
    return {
        "status": info.status,
        "finish_reason": None if info.finish_reason is None else info.finish_reason.value,
        "prompt_tokens": info.usage.num_prompt_tokens,
        "completion_tokens": info.usage.num_output_tokens,
        "timeline": asdict(info.timeline),
    }


async def get_request(http: Request, request_id: str) -> dict[str, Any]:
    """Raises InvalidRequest (404) for an id that isn't known, or isn't any more."""
    engine: AsyncLLMEngine = http.app.state.engine
    infos = engine.request_info(request_id)
    if not infos:
        raise InvalidRequest(
            f"no request {request_id[:100]!r} is known; those that have ended are kept for some minutes",
            param="id",
            code="request_not_found",
        )
    return {"id": request_id, "object": "request", "prompts": [state_of(info) for info in infos]}


def add_request_route(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/requests/{request_id}",
        get_request,
        response_model=responses.RequestState,
        responses=describe_errors(401, 404),
        summary="Where a request stands",
        tags=["operations"],
    )
