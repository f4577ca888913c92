"""What happens to every request, whatever its route: an id, one log line, the HTTP counters, and an envelope for our own bugs."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagestream.server.errors import HttpError, error_response
from pagestream.server.metrics import Metrics

log = logging.getLogger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
CLIENT_LEFT = 499  # nginx's number; seen in logs and counters only
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestContext:
    """Outermost.  The client's X-Request-Id comes back on every response, errors included; without one it gets a fresh one.

    Inside, requests are known by ids of our own, since clients may send the same id twice; the log line has both.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = client_request_id(scope) or uuid.uuid4().hex
        status, start_s = CLIENT_LEFT, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            log.exception("%s %s failed, request id %s", scope["method"], scope["path"], request_id)
            if status == CLIENT_LEFT:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self.finish(scope, request_id, status, time.monotonic() - start_s)

    def finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        # Only names of our own: what a client invents must not become a label.
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.http_request(handler, method, status, seconds)
        answer_id = scope.get("state", {}).get("answer_id", "-")
        level = logging.DEBUG if method == "GET" and status < 400 else logging.INFO
        edge = {
            "method": method, "path": scope["path"], "status": status, "seconds": round(seconds, 4),
            "request_id": request_id, "answer_id": answer_id,
        }  # fmt: skip
        log.log(level, "%s %s %d in %.3f s, request id %s, answer %s", *edge.values(), extra=edge)


def client_request_id(scope: Scope) -> str | None:
    """None unless it is short and printable: it goes into headers and logs."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if REQUEST_ID.fullmatch(text) else None
    return None


class ApiKey:
    """Asks for a key on everything below /v1; probes and metrics stay open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS"
        if is_open or self.holds_key(dict(scope["headers"]).get(b"authorization", b"")):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refusal = HttpError(401, "a valid key is needed: Authorization: Bearer <key>", code="invalid_api_key", headers=headers)
        await error_response(refusal)(scope, receive, send)

    def holds_key(self, authorization: bytes) -> bool:
        kind, _, given = authorization.partition(b" ")
        # Every key is compared, and in constant time, so that timing tells nothing about them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return kind.lower() == b"bearer" and any(matches)
