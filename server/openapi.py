"""The API's description: FastAPI's own, and the bodies that are read by hand (see body.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pagestream.server.messages.shapes import AnthropicError, AnthropicMessage, TokenCount
from pagestream.server.responses import ChatCompletionChunk, Completion, EmbeddingList, ErrorEnvelope
from pagestream.server.responses_api.shapes import ResponseObject

SCHEMAS = "#/components/schemas/"

ERRORS = {
    400: "A field can't be served, the body is no JSON object, or prompt and answer exceed the context",
    401: "No valid key",
    404: "Unknown model, request or stream",
    408: "The body came too slowly, or the time given was over before anything was generated",
    409: "Another body came with this Idempotency-Key before",
    413: "The body is too large",
    415: "The body is not called application/json, or is compressed",
    429: "The queue is full; see Retry-After",
    500: "The request could not be computed",
    503: "The server is ending; see Retry-After",
}

MESSAGE_EVENTS = (
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", "error",
)  # fmt: skip
RESPONSE_EVENTS = (
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta",
    "response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done",
    "response.content_part.done", "response.output_item.done", "response.completed", "response.incomplete", "response.failed",
)  # fmt: skip

Responses = dict[int | str, dict[str, Any]]


def describe_errors(*statuses: int, model: type[BaseModel] = ErrorEnvelope) -> Responses:
    return {status: {"model": model, "description": ERRORS[status]} for status in statuses}


def describe_body(wire: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference(wire)}}}}


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": SCHEMAS + model.__name__}


def describe_events(words: str, data: dict[str, Any], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """A stream of events whose data is JSON of this schema.

    `x-itemSchema` is what OpenAPI 3.2 calls itemSchema, written as there; 3.1, which generators of clients read, has no word for it.
    """
    fields: dict[str, Any] = {"data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data}}
    if names:
        fields["event"] = {"type": "string", "enum": list(names)}
    item = {"type": "object", "required": sorted(fields), "properties": fields}
    return {"text/event-stream": {"schema": {"type": "string", "description": words}, "x-itemSchema": item}}


def either(*models: type[BaseModel]) -> dict[str, Any]:
    return {"oneOf": [reference(model) for model in models]}


def describe_generation(
    whole: type[BaseModel], content: dict[str, Any], *statuses: int, error: type[BaseModel] = ErrorEnvelope
) -> Responses:
    answer = {"model": whole, "content": content, "description": "The answer, whole or as a stream"}
    return {200: answer} | describe_errors(*sorted((400, 401, 404, 408, 413, 415, 429, 500, 503, *statuses)), model=error)


def describe_answer(whole: type[BaseModel], chunk: type[BaseModel]) -> Responses:
    words = f"Events `data: <{chunk.__name__}>`, the last one `data: [DONE]`; a failure is one event with an ErrorEnvelope before it."
    return describe_generation(whole, describe_events(words, either(chunk, ErrorEnvelope)), 409)


def describe_messages() -> Responses:
    words = "Events of Anthropic's API, message_start to message_stop; a failure is an event `error`."
    events = describe_events(words, named_data(MESSAGE_EVENTS), MESSAGE_EVENTS)
    return describe_generation(AnthropicMessage, events, error=AnthropicError)


def describe_count() -> Responses:
    told: Responses = {200: {"model": TokenCount, "description": "How many tokens the prompt of such a message has"}}
    return told | describe_errors(400, 401, 404, 408, 413, 415, model=AnthropicError)


def describe_response() -> Responses:
    words = "Events `response.created` to `response.completed`, `response.incomplete` or `response.failed`."
    return describe_generation(ResponseObject, describe_events(words, named_data(RESPONSE_EVENTS, "sequence_number"), RESPONSE_EVENTS))


def named_data(names: tuple[str, ...], *counters: str) -> dict[str, Any]:
    """An object that says which event it belongs to."""
    fields: dict[str, Any] = {"type": {"type": "string", "enum": list(names)}}
    fields |= {counter: {"type": "integer", "minimum": 0} for counter in counters}
    return {"type": "object", "required": list(fields), "properties": fields}


def describe_embeddings() -> Responses:
    told: Responses = {200: {"model": EmbeddingList, "description": "One embedding for each input, in their order"}}
    return told | describe_errors(400, 401, 404, 408, 413, 415, 429, 500, 503)


def describe_stream() -> Responses:
    """Of a stream that goes on."""
    words = "The events after the one that Last-Event-ID names, as they were or come; each has an id."
    events = describe_events(words, either(Completion, ChatCompletionChunk, ErrorEnvelope))
    told: Responses = {200: {"content": events, "description": "The rest of the stream"}}
    return told | {204: {"description": "The reader has had all of it"}} | describe_errors(400, 401, 404)


def describe_live() -> Responses:
    stream = {"schema": {"type": "string", "description": "Events `data: {…}`: the whole state, then what has changed."}}
    told: Responses = {200: {"content": {"text/event-stream": stream}, "description": "Ten events a second at most"}}
    return told | describe_errors(401)


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
