"""Probes, the version and the metrics: everything that a supervisor asks, none of which waits for the engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import Request, Response

from pagestream.server.errors import json_response
from pagestream.server.state import server_state


class MetricsText(Response):
    media_type = "text/plain; version=0.0.4; charset=utf-8"


def verdict(is_well: bool, well: str, ill: str) -> Response:
    if is_well:
        return json_response({"status": well})
    return json_response({"status": ill}, 503, {"Retry-After": "1"})


async def get_health(http: Request) -> Response:
    """Whether the process can still serve: false only when it must be restarted.  A server that drains is well."""
    return verdict(not server_state(http).engine.is_dead, "ok", "the engine has ended")


async def get_readiness(http: Request) -> Response:
    """Whether new requests should be sent here: false from the first moment of a drain, and while steps do not end."""
    state = server_state(http)
    engine, limit_s = state.engine, state.settings.stall_timeout_s
    if engine.is_dead:
        return verdict(False, "ready", "the engine has ended")
    if 0 < limit_s < engine.stalled_s:
        return verdict(False, "ready", f"stalled: no step has ended for {engine.stalled_s:.0f} s")
    return verdict(engine.is_ready, "ready", "draining")


async def get_version(http: Request) -> dict[str, Any]:
    return {"version": version("pagestream")}


async def get_metrics(http: Request) -> Response:
    return MetricsText(server_state(http).metrics.exposition())
