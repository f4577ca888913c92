"""OpenTelemetry spans of each request, behind --otlp-endpoint: the HTTP request, and within it queue, prefill and decode.

A span is made when what it tells is over, from times that are taken anyway: a request costs a few spans at its end and nothing
before.  The engine tells of a request's end on its own thread, HTTP on the event loop; whichever is last brings both together.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagestream.engine import RequestStats, StartError

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
MAX_KEPT = 4096  # answers of which one half is known; more than that only if the other halves never come


def check_tracing(endpoint: str | None) -> None:
    """Raises StartError where tracing is asked for and can't be done."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise StartError(f"--otlp-endpoint must be an http or https URL, such as http://127.0.0.1:4318, not {endpoint!r}")
    try:
        is_there = find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise StartError("--otlp-endpoint needs OpenTelemetry: pip install 'pagestream[tracing]'")


@dataclass(frozen=True, slots=True)
class HttpEdge:
    """One HTTP request at its end; times of the monotonic clock."""

    method: str
    route: str
    status: int | None  # None: the client left before there was one
    start_s: float
    end_s: float
    traceparent: str | None
    tracestate: str | None


class Tracing:
    """Exports to one collector, over HTTP, in a thread of its own.  Any thread may tell it of an end."""

    def __init__(self, endpoint: str, model_name: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        own_version = version("pagestream")
        # Not the global provider: two servers in one process must not share one.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "pagestream", "service.version": own_version}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("pagestream", own_version)
        self._model_name = model_name
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._lock = threading.Lock()
        self._computed: OrderedDict[str, list[RequestStats]] = OrderedDict()  # by answer; their HTTP request goes on
        self._answered: OrderedDict[str, Any] = OrderedDict()  # contexts, for requests that end after their HTTP request

    def request_finished(self, stats: RequestStats) -> None:
        answer_id = stats.request_id.rpartition("-")[0]
        with self._lock:
            context = self._answered.get(answer_id)
            if context is None:
                self._computed.setdefault(answer_id, []).append(stats)
                bound(self._computed)
                return
        self._tell_request(stats, context)

    def http_finished(self, edge: HttpEdge, answer_id: str | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": edge.traceparent or "", "tracestate": edge.tracestate or ""}
        parent = TraceContextTextMapPropagator().extract(carrier)
        attributes: dict[str, Any] = {"http.request.method": edge.method, "http.route": edge.route, "pagestream.answer_id": answer_id or ""}
        if edge.status is not None:
            attributes["http.response.status_code"] = edge.status
        span = self._tracer.start_span(
            f"{edge.method} {edge.route}", parent, SpanKind.SERVER, attributes, start_time=self._ns(edge.start_s)
        )
        if edge.status is None or edge.status >= 500:
            span.set_status(Status(StatusCode.ERROR, "the client left" if edge.status is None else None))
        context = set_span_in_context(span)
        computed: list[RequestStats] = []
        if answer_id is not None:
            with self._lock:
                computed = self._computed.pop(answer_id, [])
                self._answered[answer_id] = context
                bound(self._answered)
        for stats in computed:
            self._tell_request(stats, context)
        span.end(self._ns(edge.end_s))

    def shutdown(self) -> None:
        """Send what is left; waits for it."""
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return self._epoch_ns + int(at_s * 1e9)

    def _tell_request(self, stats: RequestStats, context: Any) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": stats.max_tokens,
            "gen_ai.request.choice.count": stats.n,
            "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
            "gen_ai.usage.output_tokens": stats.num_output_tokens,
            "gen_ai.response.id": stats.request_id,
            "gen_ai.response.finish_reasons": [stats.finish_reason.value],
            "pagestream.num_cached_tokens": stats.num_cached_tokens,
            "pagestream.num_preemptions": stats.num_preemptions,
        }
        span = self._tracer.start_span("generate", context, attributes=attributes, start_time=self._ns(stats.arrival_s))
        if stats.finish_reason.value == "error":
            span.set_status(Status(StatusCode.ERROR))
        inner = set_span_in_context(span)
        edges = [("queue", stats.arrival_s), ("prefill", stats.scheduled_s), ("decode", stats.first_token_s), ("", stats.finished_s)]
        reached = [(name, at_s) for name, at_s in edges if at_s is not None]
        for (name, start_s), (_, end_s) in zip(reached, reached[1:], strict=False):
            self._tracer.start_span(name, inner, start_time=self._ns(start_s)).end(self._ns(end_s))
        span.end(self._ns(stats.finished_s))


def bound(kept: OrderedDict[str, Any]) -> None:
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)


class TraceRequests:
    """Tells of every request that asks for an answer; probes and pages are no requests that anybody traces."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        start_s = time.monotonic()
        status: int | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name.startswith(b"trace")}
            route = getattr(scope.get("route"), "path", "none")
            edge = HttpEdge(
                scope["method"], route, status, start_s, time.monotonic(), headers.get(b"traceparent"), headers.get(b"tracestate")
            )
            self.tracing.http_finished(edge, scope.get("state", {}).get("answer_id"))
