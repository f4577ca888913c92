"""What happens to every request, whatever its route: an id, one log line, the HTTP counters, and an envelope for our own bugs."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagestream.engine import Overloaded
from pagestream.server.body import IDEMPOTENCY_KEY
from pagestream.server.errors import HttpError, error_response, is_anthropic, own_path
from pagestream.server.key_limits import given_key
from pagestream.server.metrics import Metrics

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
CLIENT_LEFT = 499  # nginx's number; seen in logs and counters only
PUBLIC = frozenset(("/", "/health", "/livez", "/readyz", "/version", "/metrics", "/openapi.json", "/docs"))
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestContext:
    """Outermost.  The client's X-Request-Id comes back on every response, errors included; without one it gets a fresh one.

    Inside, requests are known by ids of our own, since clients may send the same id twice; the log line has both.  `root_path` is
    what a proxy serves this server under: it may come along in a path or be cut off on the way.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, root_path: str = ""):
        self.app = app
        self.metrics = metrics
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not scope["path"].startswith("/"):
            scope["path"] = path_alone(scope["path"])
        if self.root_path:
            scope["root_path"] = self.root_path
        request_id = client_request_id(scope) or uuid.uuid4().hex
        status, start_s, num_sent_bytes = CLIENT_LEFT, time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                sign(MutableHeaders(scope=message), scope, request_id, time.monotonic() - start_s)
            else:
                num_sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            log.exception("%s %s failed, request id %s", scope["method"], scope["path"], request_id)
            if status == CLIENT_LEFT:
                await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            note_end(self.metrics, scope, request_id, status, time.monotonic() - start_s, num_sent_bytes)


def sign(headers: MutableHeaders, scope: Scope, request_id: str, seconds: float) -> None:
    """Give a response what all have: its request's id, and how long it took until it began."""
    headers["X-Request-Id"] = request_id
    if is_anthropic(scope):
        headers["Request-Id"] = request_id  # where clients of that API look
    headers["OpenAI-Processing-Ms"] = str(round(seconds * 1000))


def note_end(metrics: Metrics, scope: Scope, request_id: str, status: int, seconds: float, num_sent_bytes: int) -> None:
    """One line in the log, and the counters."""
    # Only names of our own: what a client invents must not become a label.
    handler = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in METHODS else "other"
    metrics.http_request(handler, method, status, seconds, body_bytes(scope), num_sent_bytes)
    answer_id = scope.get("state", {}).get("answer_id", "-")
    level = logging.DEBUG if method in ("GET", "HEAD") and status < 400 else logging.INFO
    edge = {
        "method": method, "path": scope["path"], "status": status, "seconds": round(seconds, 4),
        "request_id": request_id, "answer_id": answer_id,
    }  # fmt: skip
    log.log(level, "%s %s %d in %.3f s, request id %s, answer %s", *edge.values(), extra=edge)


def path_alone(target: str) -> str:
    """Of a whole address, as clients send it to what they take for a proxy; anything else stays as it is."""
    found = re.match(r"https?://[^/]*(?=/)", target, re.IGNORECASE)
    return target[found.end() :] if found else target


def client_request_id(scope: Scope) -> str | None:
    """None unless it is short and printable: it goes into headers and logs."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if REQUEST_ID.fullmatch(text) else None
    return None


def body_bytes(scope: Scope) -> int:
    """Of the request, as its header says; 0 where it says nothing, or nothing that can be."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 16 else 0
    return 0


def is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith("/ui/")


class ApiKey:
    """Asks for a key on every route but those of PUBLIC; below /ui lie the page's files, which hold no secret."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or is_public(own_path(scope)) or scope["method"] == "OPTIONS"
        if is_open or holds_key(self.keys, given_key(scope)):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refusal = HttpError(401, "a valid key is needed: Authorization: Bearer <key>", code="invalid_api_key", headers=headers)
        await error_response(refusal, scope)(scope, receive, send)


def holds_key(keys: Sequence[bytes], given: bytes) -> bool:
    # Every key is compared, and in constant time, so that timing tells nothing about them.
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


class RefuseWhileFull:
    """Refuses requests while the queue has no place, before a body is read and a prompt is cut into tokens.

    A flood of refusals takes the cores from those who are served; most never come so far, see early_refusal.py.  Whoever sends an
    Idempotency-Key may have his answer already.
    """

    def __init__(self, app: ASGIApp, engine: AsyncLLMEngine, routes: Mapping[str, BaseRoute]):
        """routes: by their paths, those whose requests are queued."""
        self.app = app
        self.engine = engine
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.routes.get(own_path(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is not None and IDEMPOTENCY_KEY not in Headers(scope=scope):
            try:
                self.engine.refuse_while_full()
            except Overloaded as error:
                scope["route"] = route  # for the counters
                await error_response(error, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)
