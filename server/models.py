"""GET /v1/models and /v1/models/{name}: every name of the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from pagestream.server.generation import check_name
from pagestream.server.state import server_state


def card(http: Request, name: str) -> dict[str, Any]:
    state = server_state(http)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pagestream",
        "root": state.settings.model or state.settings.name,
        "parent": None,
        "max_model_len": state.engine.max_model_len,
    }


async def list_models(http: Request) -> dict[str, Any]:
    return {"object": "list", "data": [card(http, name) for name in server_state(http).settings.served_model_names]}


async def get_model(http: Request, name: str) -> dict[str, Any]:
    """Raises InvalidRequest (404) for a name that isn't served."""
    check_name(http, name)
    return card(http, name)
