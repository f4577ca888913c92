"""Every route, with what the description of the API says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from sse_starlette import EventSourceResponse

from pagestream.server import (
    chat,
    completions,
    embeddings,
    health,
    live,
    models,
    parameters,
    requests,
    responses,
    streams,
    tokenize,
)
from pagestream.server.messages import route as messages
from pagestream.server.openapi import (
    Responses,
    describe_answer,
    describe_body,
    describe_count,
    describe_embeddings,
    describe_errors,
    describe_live,
    describe_messages,
    describe_response,
    describe_stream,
)
from pagestream.server.parameters import ENDPOINTS
from pagestream.server.responses_api.route import create_response

Route = Callable[..., Any]


def add_routes(app: FastAPI) -> None:
    add_generation(app)
    add_models(app)
    add_operations(app)


def add_generation(app: FastAPI) -> None:
    def post(path: str, route: Route, summary: str, answers: Responses) -> None:
        app.add_api_route(
            path, route, methods=["POST"], summary=summary, responses=answers, openapi_extra=describe_body(ENDPOINTS[path]),
            tags=["generation"],
        )  # fmt: skip

    completion = describe_answer(responses.Completion, responses.Completion)
    conversation = describe_answer(responses.ChatCompletion, responses.ChatCompletionChunk)
    post("/v1/completions", completions.create_completion, "Complete a prompt", completion)
    post("/v1/chat/completions", chat.create_chat_completion, "Answer a conversation", conversation)
    post("/v1/messages", messages.create_message, "Answer a conversation in Anthropic's shape", describe_messages())
    post("/v1/messages/count_tokens", messages.count_tokens, "The tokens that a message's prompt would have", describe_count())
    post("/v1/responses", create_response, "Answer a conversation in the shape of OpenAI's responses", describe_response())
    post("/v1/embeddings", embeddings.create_embeddings, "Embeddings of texts", describe_embeddings())
    app.add_api_route(
        "/v1/streams/{stream_id}",
        streams.get_stream,
        summary="Go on with a resumable stream",
        responses=describe_stream(),
        tags=["generation"],
    )


def add_models(app: FastAPI) -> None:
    def add(path: str, route: Route, shape: Any, summary: str, answers: Responses, **more: Any) -> None:
        app.add_api_route(path, route, response_model=shape, summary=summary, responses=answers, tags=["models"], **more)

    def post(path: str, route: Route, shape: Any, summary: str) -> None:
        errors = describe_errors(400, 401, 404, 408, 413, 415)
        add(path, route, shape, summary, errors, methods=["POST"], openapi_extra=describe_body(ENDPOINTS[path]))

    no_key, unknown = describe_errors(401), describe_errors(401, 404)
    post("/tokenize", tokenize.tokenize, responses.Tokens, "Token ids of a text or a conversation")
    post("/detokenize", tokenize.detokenize, responses.Detokenized, "The text of token ids")
    add(
        "/v1/parameters", parameters.get_parameters, responses.Parameters, "Every field of every request, with its range", no_key
    )
    add("/v1/models", models.list_models, responses.ModelList, "Served names", no_key)
    add("/v1/models/{name:path}", models.get_model, responses.ModelCard, "One served name", unknown)


def add_operations(app: FastAPI) -> None:
    def add(path: str, route: Route, summary: str, **more: Any) -> None:
        app.add_api_route(path, route, summary=summary, tags=["operations"], **more)

    add(
        "/v1/engine/events",
        live.get_engine_events,
        "The engine's blocks and requests, live",
        responses=describe_live(),
        response_class=EventSourceResponse,
    )
    add(
        "/v1/requests/{request_id}",
        requests.get_request,
        "Where a request stands",
        response_model=responses.RequestState,
        responses=describe_errors(401, 404),
    )
    verdicts: Responses = {200: {"model": responses.Health}, 503: {"model": responses.Health, "description": "Not so"}}
    for path, route, summary in (
        ("/health", health.get_health, "Whether the server can serve"),
        ("/livez", health.get_health, "Whether the process should live"),
        ("/readyz", health.get_readiness, "Whether to send requests here"),
    ):
        add(path, route, summary, responses=verdicts)
    add("/version", health.get_version, "The server's version", response_model=responses.Version)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format"}}
    add("/metrics", health.get_metrics, "Metrics", responses=text, response_class=health.MetricsText)
