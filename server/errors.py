"""Exceptions to HTTP: one table, one envelope, for whole answers and for streams alike.

The envelope is OpenAI's, nested: {"error": {"message", "type", "param", "code"}}.  Below /v1/messages it is Anthropic's, which has a
type of its own beside the error and other names for some types.  Its size is bounded whatever the client sent.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from pagestream.engine import (
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineFault,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)

log = logging.getLogger(__name__)

# Escaped as ASCII a character may take six bytes: together below 4 KB.
MAX_MESSAGE_CHARS = 500
MAX_PARAM_CHARS = 80

TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout", 429: "rate_limit_error", 503: "service_unavailable"}
ANTHROPIC_TYPES = {404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}

# Not by `raise` alone: official clients repeat every 5xx, and what failed by its own content would fail again.
NO_RETRY = {"x-should-retry": "false"}
NOT_FOUND = ("model_not_found", "request_not_found")  # codes of a 404; every other mistake of the client's is a 400


class HttpError(Exception):
    """A refusal that HTTP itself asks for, before any engine is involved."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.error = ApiError(status, message, param, code, headers or {})


@dataclass(frozen=True, slots=True)
class ApiError:
    """What the client is told."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def envelope(self) -> dict[str, Any]:
        param = None if self.param is None else cut(self.param, MAX_PARAM_CHARS)
        return {"error": {"message": cut(self.message, MAX_MESSAGE_CHARS), "type": self.type, "param": param, "code": self.code}}

    def anthropic_envelope(self) -> dict[str, Any]:
        error = self.envelope()["error"]
        return {"type": "error", "error": error | {"type": ANTHROPIC_TYPES.get(self.status, self.type)}}


def cut(text: str, limit: int) -> str:
    """At most so many characters of it, printable ones of any script; lone surrogates can't be sent and are replaced."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def seconds(value: float) -> str:
    """For Retry-After: whole and at least 1, as HTTP and the official clients read it."""
    return str(max(1, math.ceil(value)))


def as_api_error(error: Exception) -> ApiError:
    """The table.  Anything unknown is a bug of ours: it is logged by the caller and told without its words."""
    match error:
        case HttpError():
            return error.error
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))
        case Overloaded():
            headers = {"Retry-After": seconds(error.retry_after_s)}
            return ApiError(503 if error.draining else 429, error.message, error.param, error.code, headers)
        case DeadlineExceeded():
            return ApiError(408, error.message, error.param, error.code)
        case ClientError():
            return ApiError(404 if error.code in NOT_FOUND else 400, error.message, error.param, error.code)
        case RequestFailed():
            return ApiError(500, str(error) or "the request could not be computed", code="request_failed", headers=NO_RETRY)
        case EngineDead():
            return ApiError(503, str(error) or "the engine has ended", code="engine_dead", headers={"Retry-After": "5"})
        case EngineFault():
            return ApiError(500, str(error) or "the engine failed", code="engine_fault", headers=NO_RETRY)
    return ApiError(
        500, "internal error; the server's log has the details under this request's id", code="internal_error", headers=NO_RETRY
    )


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of fields that the client knows by other names are told by those."""
    try:
        yield
    except (InvalidRequest, ContextLengthExceeded) as error:
        message = error.message
        for name, said in names.items():
            message = re.sub(rf"\b{name}\b", said, message)
        raise InvalidRequest(message, param=names.get(error.param or "", error.param), code=error.code) from None


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """ASCII only, so that nothing in a text can break it on its way; NaN would be a bug and raises ValueError."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_response(error: Exception, scope: Scope) -> Response:
    told = as_api_error(error)
    envelope = told.anthropic_envelope() if is_anthropic(scope) else told.envelope()
    return json_response(envelope, told.status, told.headers)


def own_path(scope: Scope) -> str:
    """The path as the routes know it: without the prefix that a proxy serves this server under, if that came along."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(root + "/") else path


def is_anthropic(scope: Scope) -> bool:
    """Whether the request is meant for Anthropic's API."""
    return f"{own_path(scope)}/".startswith("/v1/messages/")


def likely_route(request: Request) -> str:
    """A hint for those whose client adds /v1 by itself, or leaves it to them; empty for any other path."""
    rest = own_path(request.scope).strip("/")
    while rest.startswith("v1/"):
        rest = rest.removeprefix("v1/")
    known = {getattr(route, "path", "") for route in request.app.routes} - {own_path(request.scope)}
    meant = next((path for path in (f"/v1/{rest}", f"/{rest}") if rest and path in known), "")
    return f"; did you mean {meant}?" if meant else ""


def add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, EngineFault):
            log.error("%s %s failed: %s", request.method, request.url.path, error)
        if isinstance(error, HTTPException):  # of the router, whose words do not say what was asked for
            detail = f"{error.detail}: {request.method} {request.url.path}{likely_route(request)}"
            error = HTTPException(error.status_code, detail, dict(error.headers or {}))
        return error_response(error, request.scope)

    for kind in (HttpError, HTTPException, EngineError):
        app.add_exception_handler(kind, answer)
