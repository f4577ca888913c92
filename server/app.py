"""The web application around one engine.  Nothing here is global: what a route needs is in `app.state`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from pagestream.server import chat, completions, embeddings, health, models, parameters, responses, streams, tokenize
from pagestream.server.errors import add_error_handlers
from pagestream.server.journal import Journal
from pagestream.server.key_limits import KeyLimits
from pagestream.server.live import LiveFeed, add_live_route
from pagestream.server.messages.route import count_tokens, create_message
from pagestream.server.messages.wire import CountTokensRequest, MessagesRequest
from pagestream.server.metrics import Metrics
from pagestream.server.middleware import ApiKey, RequestContext
from pagestream.server.openapi import (
    Responses,
    describe_answer,
    describe_body,
    describe_count,
    describe_embeddings,
    describe_errors,
    describe_messages,
    describe_response,
    describe_stream,
    with_request_schemas,
)
from pagestream.server.pages import add_pages
from pagestream.server.protocol import ChatRequest, CompletionRequest
from pagestream.server.requests import add_request_route
from pagestream.server.responses_api.route import create_response
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.restore import Restorer
from pagestream.server.settings import ServerSettings
from pagestream.server.shared import SharedAnswers
from pagestream.server.tracing import TraceRequests, Tracing
from pagestream.server.watchdog import Watchdog

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

TITLE = "pagestream"
ENDLESS = ("/v1/engine/events", "/v1/streams/{stream_id}")  # streams: who asks for their head would wait for their end
EXPOSED_HEADERS = ["X-Request-Id", "Retry-After", "X-Should-Retry", "OpenAI-Processing-Ms"]  # to other origins' pages
DESCRIPTION = "An OpenAI-compatible API over an async, streaming LLM engine with a paged KV cache."


def create_app(
    engine: AsyncLLMEngine, settings: ServerSettings, metrics: Metrics, journal: Journal | None = None
) -> FastAPI:
    """The application; its start starts the engine's loop, its end ends it.  The engine must already listen to `metrics`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        watchdog = Watchdog(engine, settings.stall_timeout_s)
        watchdog.start()
        if journal is not None:
            engine.on_outputs = journal.outputs
            restorer = Restorer(journal, engine, settings, app.state.shared_answers, metrics)
            app.state.shared_answers.find_earlier = restorer.find
            await restorer.resume_unfinished()
        try:
            yield
        finally:
            watchdog.stop()
            await engine.stop()
            await app.state.shared_answers.close()
            if journal is not None:
                journal.close()
            if metrics.tracing is not None:
                await asyncio.to_thread(metrics.tracing.shutdown)

    app = bare_app(lifespan=lifespan)
    app.state.engine = engine
    app.state.settings = settings
    app.state.metrics = metrics
    app.state.journal = journal
    app.state.key_limits = KeyLimits(settings.max_requests_per_key, settings.max_tokens_per_minute_per_key)
    app.state.shared_answers = SharedAnswers(settings)
    app.state.created = int(time.time())
    app.state.live = LiveFeed(engine)
    metrics.watch(engine)
    if settings.ui:
        add_pages(app)
    answer_heads(app)
    # The last one added is the outermost.
    if settings.api_keys:
        app.add_middleware(ApiKey, keys=settings.api_keys)
    if settings.allowed_origins:
        origins = list(settings.allowed_origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
        )
    if settings.otlp_endpoint:
        metrics.tracing = Tracing(settings.otlp_endpoint, settings.name)
        app.add_middleware(TraceRequests, tracing=metrics.tracing)
    app.add_middleware(RequestContext, metrics=metrics, root_path=settings.root_path)
    return app


def answer_heads(app: FastAPI) -> None:
    """HEAD where GET is answered, as HTTP has it and balancers ask; not described, since it is the same without a body."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"} and route.path not in ENDLESS:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def bare_app(**options: Any) -> FastAPI:
    """Routes and error envelopes without an engine: enough to be described."""
    app = FastAPI(
        title=TITLE, description=DESCRIPTION, version=version("pagestream"), redirect_slashes=False, redoc_url=None, **options
    )
    add_routes(app)
    add_error_handlers(app)
    with_request_schemas(app, CompletionRequest, ChatRequest, MessagesRequest, CountTokensRequest, ResponsesRequest, embeddings.EmbeddingRequest, tokenize.TokenizeRequest, tokenize.DetokenizeRequest, responses.ChatCompletionChunk)
    return app


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/completions",
        completions.create_completion,
        methods=["POST"],
        summary="Complete a prompt",
        responses=describe_answer(responses.Completion, "Completion"),
        openapi_extra=describe_body("CompletionRequest"),
        tags=["generation"],
    )
    app.add_api_route(
        "/v1/chat/completions",
        chat.create_chat_completion,
        methods=["POST"],
        summary="Answer a conversation",
        responses=describe_answer(responses.ChatCompletion, "ChatCompletionChunk"),
        openapi_extra=describe_body("ChatRequest"),
        tags=["generation"],
    )
    add_live_route(app)
    add_request_route(app)
    app.add_api_route(
        "/v1/streams/{stream_id}",
        streams.get_stream,
        methods=["GET"],
        summary="Go on with a resumable stream",
        responses=describe_stream(),
        tags=["generation"],
    )
    for path, create, answers, body, summary in (
        ("/v1/messages", create_message, describe_messages(), "MessagesRequest", "Answer a conversation in Anthropic's shape"),
        (
            "/v1/messages/count_tokens", count_tokens, describe_count(), "CountTokensRequest",
            "The tokens that a message's prompt would have",
        ),
        (
            "/v1/responses", create_response, describe_response(), "ResponsesRequest",
            "Answer a conversation in the shape of OpenAI's responses",
        ),
        ("/v1/embeddings", embeddings.create_embeddings, describe_embeddings(), "EmbeddingRequest", "Embeddings of texts"),
    ):  # fmt: skip
        app.add_api_route(
            path,
            create,
            methods=["POST"],
            summary=summary,
            responses=answers,
            openapi_extra=describe_body(body),
            tags=["generation"],
        )
    no_key = describe_errors(401)
    for path, door, shape, body, summary in (
        ("/tokenize", tokenize.tokenize, responses.Tokens, "TokenizeRequest", "Token ids of a text or a conversation"),
        ("/detokenize", tokenize.detokenize, responses.Detokenized, "DetokenizeRequest", "The text of token ids"),
    ):
        app.add_api_route(
            path,
            door,
            methods=["POST"],
            response_model=shape,
            responses=describe_errors(400, 401, 404, 413, 415),
            openapi_extra=describe_body(body),
            summary=summary,
            tags=["models"],
        )
    app.add_api_route(
        "/v1/parameters",
        parameters.get_parameters,
        response_model=responses.Parameters,
        responses=no_key,
        summary="Every field of every request, with its range",
        tags=["models"],
    )
    app.add_api_route(
        "/v1/models",
        models.list_models,
        response_model=responses.ModelList,
        responses=no_key,
        summary="Served names",
        tags=["models"],
    )
    app.add_api_route(
        "/v1/models/{name:path}",
        models.get_model,
        response_model=responses.ModelCard,
        responses=describe_errors(401, 404),
        summary="One served name",
        tags=["models"],
    )
    verdicts: Responses = {200: {"model": responses.Health}, 503: {"model": responses.Health, "description": "Not so"}}
    for path, route, summary in (
        ("/health", health.get_health, "Whether the server can serve"),
        ("/livez", health.get_health, "Whether the process should live"),
        ("/readyz", health.get_readiness, "Whether to send requests here"),
    ):
        app.add_api_route(path, route, responses=verdicts, summary=summary, tags=["operations"])
    app.add_api_route(
        "/version", health.get_version, response_model=responses.Version, summary="The server's version", tags=["operations"]
    )
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format"}}
    app.add_api_route(
        "/metrics", health.get_metrics, responses=text, response_class=health.MetricsText, summary="Metrics", tags=["operations"]
    )
