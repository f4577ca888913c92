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

from pagestream.server.early_refusal import EarlyRefusals
from pagestream.server.errors import add_error_handlers
from pagestream.server.journal import Journal
from pagestream.server.key_limits import KeyLimits
from pagestream.server.live import LiveFeed
from pagestream.server.metrics import Metrics
from pagestream.server.middleware import ApiKey, RefuseWhileFull, RequestContext
from pagestream.server.openapi import with_request_schemas
from pagestream.server.pages import add_pages
from pagestream.server.parameters import ENDPOINTS
from pagestream.server.responses import ChatCompletionChunk
from pagestream.server.restore import Restorer
from pagestream.server.routes import add_routes
from pagestream.server.settings import ServerSettings
from pagestream.server.shared import SharedAnswers
from pagestream.server.state import ServerState
from pagestream.server.tracing import TraceRequests, Tracing
from pagestream.server.watchdog import Watchdog

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

TITLE = "pagestream"
QUEUED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
ENDLESS = ("/v1/engine/events", "/v1/streams/{stream_id}")  # streams: who asks for their head would wait for their end
EXPOSED_HEADERS = ["X-Request-Id", "Retry-After", "X-Should-Retry", "OpenAI-Processing-Ms"]  # to other origins' pages
DESCRIPTION = "An OpenAI-compatible API over an async, streaming LLM engine with a paged KV cache."


def create_app(
    engine: AsyncLLMEngine, settings: ServerSettings, metrics: Metrics, journal: Journal | None = None
) -> FastAPI:
    """The application; its start starts the engine's loop, its end ends it.  The engine must already listen to `metrics`."""
    state = ServerState(
        engine=engine,
        settings=settings,
        metrics=metrics,
        journal=journal,
        key_limits=KeyLimits(settings.max_requests_per_key, settings.max_tokens_per_minute_per_key),
        shared_answers=SharedAnswers(settings),
        live=LiveFeed(engine),
        created=int(time.time()),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        watchdog = Watchdog(engine, settings.stall_timeout_s)
        watchdog.start()
        if journal is not None:
            engine.on_outputs = journal.outputs
            restorer = Restorer(state, journal)
            state.shared_answers.find_earlier = restorer.find
            await restorer.resume_unfinished()
        try:
            yield
        finally:
            watchdog.stop()
            await engine.stop()
            await state.shared_answers.close()
            if journal is not None:
                journal.close()
            if metrics.tracing is not None:
                await asyncio.to_thread(metrics.tracing.shutdown)

    app = bare_app(lifespan=lifespan)
    app.state.server = state
    metrics.watch(engine)
    if settings.ui:
        add_pages(app)
    answer_heads(app)
    # The last one added is the outermost.
    queued = {route.path: route for route in app.routes if isinstance(route, APIRoute) and route.path in QUEUED}
    app.add_middleware(RefuseWhileFull, engine=engine, routes=queued)
    app.state.answer_early = EarlyRefusals(engine, metrics, settings, queued).answer if settings.otlp_endpoint is None else None
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
    with_request_schemas(app, *ENDPOINTS.values(), ChatCompletionChunk)
    return app
