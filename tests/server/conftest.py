"""A real uvicorn on a loopback port that the system chose, around an engine without a model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.app import create_app
from pagestream.server.http_protocol import protocol_for
from pagestream.server.journal import Journal
from pagestream.server.metrics import Metrics
from pagestream.server.serving import KEEP_ALIVE_S, bind
from pagestream.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


@dataclass
class Live:
    """A server that runs in a thread of its own."""

    port: int
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    client: httpx.Client
    app: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "m", **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", **fields)

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": text}], **fields})

    def raw(self, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
        return self.client.post(path, content=body, headers={"Content-Type": "application/json"} | headers)

    def on_loop(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a plain function on the server's loop, where the engine lives."""

        async def run() -> Any:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
            time.sleep(0.002)

    def metric(self, start: str) -> float:
        """The sum of the samples of this name, or, where `start` has labels too, of those whose lines begin so."""
        lines = self.client.get("/metrics").text.splitlines()
        starts = (start,) if "{" in start else (start + "{", start + " ")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(starts))

    def connect(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A bare socket with the request sent."""
        raw = json.dumps({"model": "m", **body}).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        return sock


@contextmanager
def served(engine: Any, metrics: Metrics, journal: Journal | None = None, **settings: Any) -> Iterator[Live]:
    """A server around this engine, which must already listen to the metrics."""
    options = {"served_model_names": ("m", "other/name"), "sse_keep_alive_interval_s": 0} | settings
    chosen = ServerSettings(**options)
    app = create_app(engine, chosen, metrics, journal)
    protocol: Any = protocol_for(app)
    bound = bind("127.0.0.1", 0, options.get("slow_reader_timeout_s", 0))
    # Connections are kept as the real server keeps them: with uvicorn's 5 s, which httpx has too, either end may close one just taken.
    config = uvicorn.Config(
        app, log_config=None, access_log=False, http=protocol, ws="none", timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    end_s = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < end_s, "the server did not start"
        time.sleep(0.005)
    port = bound.getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield Live(port, engine, loops[0], client, app)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive(), "the server did not end"


@contextmanager
def running(engine_options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Live]:
    metrics = Metrics("m")
    with served(FakeEngine(metrics, **(engine_options or {})), metrics, **settings) as live:
        yield live


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for the tests of a file that leave nothing behind."""
    with running() as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., Live]]:
    """Start servers with settings of their own."""
    with ExitStack() as stack:
        yield lambda engine_options=None, **settings: stack.enter_context(running(engine_options, **settings))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event but the last, which must be [DONE]; the bytes must be nothing but such events."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks), blocks
    assert blocks.pop() == b"data: [DONE]"
    return [json.loads(block[6:]) for block in blocks]


def counts(usage: dict[str, Any]) -> list[int]:
    """The three numbers of a usage; how many tokens came from the cache may differ between runs."""
    return [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


@contextmanager
def served_model(folder: Path, **options: Any) -> Iterator[Live]:
    """A server around a real engine, which serves this checkpoint."""
    metrics = Metrics("m")
    args = EngineArgs(model=str(folder), num_kv_blocks=256, device="cpu", cpu_threads=1, **options)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as live:
        yield live


def refusal_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an envelope; checks everything that all envelopes share."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 4096
    body = response.json()
    is_anthropic = response.url.path.startswith(("/v1/messages", "/llm/v1/messages"))
    assert set(body) == ({"error", "type"} if is_anthropic else {"error"})
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
