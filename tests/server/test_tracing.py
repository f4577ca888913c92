"""Spans as a collector receives them: a request's parts within its HTTP request, within the caller's own trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pagestream.engine import StartError
from pagestream.server import tracing as module
from pagestream.server.tracing import check_tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                told = ExportTraceServiceRequest.FromString(body)
                collector.paths.add(self.path)
                collector.spans += [span for each in told.resource_spans for scope in each.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_told_by_its_parts_within_the_callers_trace(start, collector: Collector):
    live = start(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    body = {"model": "m", "prompt": ["Hello", "World"], "max_tokens": 6, "ignore_eos": True}
    assert live.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    live.until(lambda: len(collector.spans) >= 9, "all spans")
    assert collector.paths == {"/v1/traces"}
    (outer,) = collector.named("POST /v1/completions")
    assert outer.trace_id.hex() == TRACE_ID
    assert outer.parent_span_id.hex() == PARENT_ID
    assert attributes(outer)["http.response.status_code"] == 200
    requests = collector.named("generate")
    assert len(requests) == 2
    for request in requests:
        assert request.parent_span_id == outer.span_id
        assert attributes(request)["gen_ai.usage.output_tokens"] == 6
        parts = [span for span in collector.spans if span.parent_span_id == request.span_id]
        assert [span.name for span in sorted(parts, key=lambda span: span.start_time_unix_nano)] == ["queue", "prefill", "decode"]
        assert all(request.start_time_unix_nano <= span.start_time_unix_nano for span in parts)
        assert all(span.end_time_unix_nano <= request.end_time_unix_nano for span in parts)
        assert outer.start_time_unix_nano <= request.start_time_unix_nano
    assert {span.trace_id for span in collector.spans} == {outer.trace_id}


def test_a_request_that_outlives_its_client_is_still_told(start, collector: Collector):
    live = start({"step_s": 0.01}, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
    sock = live.connect({"prompt": "Hello", "max_tokens": 400, "stream": True, "ignore_eos": True})
    sock.recv(100)
    sock.close()
    live.until(lambda: bool(collector.named("generate")) and bool(collector.named("POST /v1/completions")), "both spans")
    (request,), (outer,) = collector.named("generate"), collector.named("POST /v1/completions")
    assert request.parent_span_id == outer.span_id


def test_probes_are_not_traced_and_what_is_refused_is(start, collector: Collector):
    live = start(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    live.client.get("/health")
    live.complete(prompt="Hello", temperature=9)
    live.until(lambda: bool(collector.spans), "a span")
    (span,) = collector.spans
    assert attributes(span)["http.response.status_code"] == 400


def test_without_the_packages_or_with_no_url_the_start_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_tracing(None)
    with pytest.raises(StartError, match="http or https"):
        check_tracing("localhost:4318")
    monkeypatch.setattr(module, "EXPORTER", "opentelemetry.nothing.like.this")
    with pytest.raises(StartError, match="pip install"):
        check_tracing("http://127.0.0.1:4318")
