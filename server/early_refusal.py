"""Refusals of a full queue for the price of their bytes: in a flood each would take as long as half a step of a small model does.

They are what RequestContext, ApiKey and RefuseWhileFull say together, found before a request has a task, a scope and a way through
all middlewares.  Whatever is not plain goes that way, and meets RefuseWhileFull there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

import h11
from fastapi import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from pagestream.engine import Overloaded
from pagestream.server.body import IDEMPOTENCY_KEY
from pagestream.server.errors import error_response
from pagestream.server.key_limits import given_key
from pagestream.server.metrics import Metrics
from pagestream.server.middleware import client_request_id, holds_key, note_end, sign
from pagestream.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine


class EarlyRefusals:
    """Answers a request's head alone, without waiting for anything.  Event loop's thread only."""

    def __init__(self, engine: AsyncLLMEngine, metrics: Metrics, settings: ServerSettings, routes: Mapping[str, BaseRoute]):
        """routes: by their paths, those whose requests are queued."""
        self._engine = engine
        self._metrics = metrics
        self._keys = [key.encode() for key in settings.api_keys]
        self._not_plain = {IDEMPOTENCY_KEY.encode()}  # whoever sends that may have his answer already
        if settings.allowed_origins:
            self._not_plain.add(b"origin")  # whose answers need more headers
        self._routes = {path.encode(): route for path, route in routes.items()}
        if settings.root_path:
            self._routes |= {f"{settings.root_path}{path}".encode(): route for path, route in routes.items()}
        self._root_path = settings.root_path

    def answer(self, request: h11.Request) -> Response | None:
        """The refusal, noted in log and counters; None for what is not to be refused here."""
        route = self._routes.get(request.target) if request.method == b"POST" else None
        if route is None or not self._not_plain.isdisjoint(name for name, _ in request.headers):
            return None
        start_s = time.monotonic()
        scope: Scope = {
            "method": "POST", "path": request.target.decode("ascii"), "root_path": self._root_path,
            "headers": list(request.headers), "route": route,
        }  # fmt: skip
        if self._keys and not holds_key(self._keys, given_key(scope)):
            return None
        try:
            self._engine.refuse_while_full()
        except Overloaded as error:
            response = error_response(error, scope)
            request_id = client_request_id(scope) or uuid.uuid4().hex
            sign(response.headers, scope, request_id, time.monotonic() - start_s)
            note_end(self._metrics, scope, request_id, response.status_code, time.monotonic() - start_s, len(response.body))
            return response
        return None
