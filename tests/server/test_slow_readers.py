"""Readers who take nothing, and streams that wait for their turn."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagestream.engine import FinishReason
from pagestream.server.settings import ServerSettings
from pagestream.server.sse import EventStream
from tests.server.conftest import Live

FLOOD = {"prompt": "x", "max_tokens": 50_000, "temperature": 0, "ignore_eos": True, "n": 4, "logprobs": 15, "stream": True}


def stalled(live: Live, body: dict) -> socket.socket:
    raw = json.dumps({"model": "m", **body}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


async def test_no_ping_follows_the_end():
    sent: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\ndata: [DONE]\n\n"
        while pings > len(comments):
            await asyncio.sleep(0.001)

    def comment() -> str:
        comments.append("")
        return "ping"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    comments: list[str] = []
    pings = 3
    stream = EventStream(events(), ServerSettings(("m",), sse_keep_alive_interval_s=0.001), comment)
    await stream({"type": "http", "method": "POST"}, receive, send)
    assert len(comments) >= pings
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("options", [{}, {"stream_options": {"resumable": True}}], ids=["plain", "resumable"])
def test_a_reader_who_takes_nothing_is_cut_off(start, options):
    live: Live = start({"context": 100_000, "step_s": 0.0005}, slow_reader_timeout_s=0.7, stream_resume_timeout_s=0.2)
    with stalled(live, {**FLOOD, **options}):
        live.until(lambda: bool(live.engine.streams), "admitted")
        assert live.complete(prompt="Hello", max_tokens=5).status_code == 200
        live.until(lambda: not live.engine.streams, "cut off", 60)
        assert live.engine.ended[-1][1] is FinishReason.ABORT
        assert live.engine.ended[-1][2] < 4 * 50_000


def test_a_slow_but_living_reader_is_not_cut_off(start):
    live: Live = start({"step_s": 0.01}, slow_reader_timeout_s=1.0)
    with stalled(live, {**FLOOD, "max_tokens": 200, "n": 1}) as sock:
        raw = b""
        while b"[DONE]" not in raw:
            piece = sock.recv(2048)
            assert piece, "cut off"
            raw += piece


def test_no_limit_for_slow_readers_is_no_limit(start):
    live: Live = start({"step_s": 0.001}, slow_reader_timeout_s=0, sse_keep_alive_interval_s=0.02)
    answer = live.complete(prompt="Hello", max_tokens=100, ignore_eos=True, stream=True)
    assert answer.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("options", [{}, {"stream_options": {"resumable": True}}], ids=["plain", "resumable"])
def test_a_stream_that_waits_says_where_it_stands(start, options):
    live: Live = start({"max_num_seqs": 1, "step_s": 0.01, "context": 1000}, sse_keep_alive_interval_s=0.05)
    first = live.connect({"prompt": "first", "max_tokens": 200, "ignore_eos": True, "stream": True})
    live.until(lambda: bool(live.engine.streams), "admitted")
    second = live.complete(prompt="second", max_tokens=30, ignore_eos=True, stream=True, **options).content
    assert b": waiting, position 1, about 0.5 s\n" in second
    assert second.index(b": waiting") < second.index(b"data: ")
    first.close()
