"""The API's description: FastAPI's own, and the bodies that are read by hand (see body.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pagestream.server.responses import AnthropicMessage, EmbeddingList, ErrorEnvelope, ResponseObject

SCHEMAS = "#/components/schemas/"

ERRORS = {
    400: "A field can't be served, the body is no JSON object, or prompt and answer exceed the context",
    401: "No valid key",
    404: "Unknown model, request or stream",
    408: "The time given was over before anything was generated",
    409: "Another body came with this Idempotency-Key before",
    413: "The body is too large",
    415: "The body is not called application/json",
    429: "The queue is full; see Retry-After",
    500: "The request could not be computed",
    503: "The server is ending; see Retry-After",
}


Responses = dict[int | str, dict[str, Any]]


def describe_errors(*statuses: int) -> Responses:
    return {status: {"model": ErrorEnvelope, "description": ERRORS[status]} for status in statuses}


def describe_body(schema: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": SCHEMAS + schema}}}}}


def describe_answer(whole: type[BaseModel], chunk: str) -> Responses:
    events = f"Events `data: <{chunk}>`, the last one `data: [DONE]`; a failure is one event with an ErrorEnvelope before it."
    stream = {"schema": {"type": "string", "description": events}}
    answer = {"model": whole, "content": {"text/event-stream": stream}, "description": "The answer, whole or as a stream"}
    return {200: answer} | describe_errors(400, 401, 404, 408, 409, 413, 415, 429, 500, 503)


def describe_messages() -> Responses:
    events = "Events of Anthropic's API, message_start to message_stop; a failure is an event `error`."
    stream = {"schema": {"type": "string", "description": events}}
    answer = {"model": AnthropicMessage, "content": {"text/event-stream": stream}, "description": "The message, whole or as a stream"}
    return {200: answer} | describe_errors(400, 401, 404, 413, 415, 429, 500, 503)


def describe_response() -> Responses:
    events = "Events `response.created` to `response.completed`, `response.incomplete` or `response.failed`."
    stream = {"schema": {"type": "string", "description": events}}
    answer = {"model": ResponseObject, "content": {"text/event-stream": stream}, "description": "The response, whole or as a stream"}
    return {200: answer} | describe_errors(400, 401, 404, 413, 415, 429, 500, 503)


def describe_embeddings() -> Responses:
    told: Responses = {200: {"model": EmbeddingList, "description": "One embedding for each input, in their order"}}
    return told | describe_errors(400, 401, 404, 408, 413, 415, 429, 500, 503)


def describe_stream() -> Responses:
    """Of a stream that goes on."""
    events = {"schema": {"type": "string", "description": "The events after the one that Last-Event-ID names, as they were or come"}}
    told = {200: {"content": {"text/event-stream": events}, "description": "The rest of the stream"}}
    return told | {204: {"description": "The reader has had all of it"}} | describe_errors(400, 401, 404)


def with_request_schemas(app: FastAPI, *models: type[BaseModel]) -> None:
    """Adds the schemas of models that no route names by type."""
    describe: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe()
            add_schemas(app.openapi_schema, models)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the description


def add_schemas(document: dict[str, Any], models: tuple[type[BaseModel], ...]) -> None:
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMAS + "{model}")
    schemas = document["components"]["schemas"] | found["$defs"]
    # FastAPI's own refusal of a field, which never happens here: every refusal is a 400 with our envelope.
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    document["components"]["schemas"] = dict(sorted(schemas.items()))


def as_yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
