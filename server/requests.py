"""GET /v1/requests/{id}: where a request stands and what happened to it, while it runs and for some time after its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Request

from pagestream.engine import InvalidRequest, RequestInfo
from pagestream.server.state import server_state


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
    infos = server_state(http).engine.request_info(request_id)
    if not infos:
        raise InvalidRequest(
            f"no request {request_id[:100]!r} is known; those that have ended are kept for some minutes",
            param="id",
            code="request_not_found",
        )
    return {"id": request_id, "object": "request", "prompts": [state_of(info) for info in infos]}
