"""GET /v1/models and /v1/models/{name}: every name of the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from pagestream.server.generation import unknown_model


def card(http: Request, name: str) -> dict[str, Any]:
    state = http.app.state
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
    return {"object": "list", "data": [card(http, name) for name in http.app.state.settings.served_model_names]}


async def get_model(http: Request, name: str) -> dict[str, Any]:
    """Raises InvalidRequest (404) for a name that isn't served."""
    if name not in http.app.state.settings.served_model_names:
        raise unknown_model(name)
    return card(http, name)
