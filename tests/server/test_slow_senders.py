"""Clients that begin a request and never end it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from pagestream.server.body import MIN_BYTES_SENT
from tests.server.conftest import Live

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
BODY = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1}).encode()
LIMIT_S = 1.0


@pytest.fixture
def impatient(start: Callable[..., Live]) -> Live:
    return start(slow_sender_timeout_s=LIMIT_S)


def drip(sock: socket.socket, rest: bytes) -> bytes:
    """What comes back until the server closes, while the rest is sent byte by byte."""
    sock.settimeout(0.05)
    raw, end_s = b"", time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            if rest:
                sock.sendall(rest[:1])
                rest = rest[1:]
            piece = sock.recv(1 << 16)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):  # closed while a byte was on its way
            return raw
        if not piece:
            return raw
        raw += piece
    raise AssertionError("the connection was never closed")


def refusal_in(raw: bytes) -> dict:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    return json.loads(body)["error"]


@pytest.mark.parametrize("before", [b"", HEAD % (b"/v1/completions", len(BODY)) + BODY], ids=["first", "second"])
def test_a_head_that_never_ends_is_refused(impatient: Live, before):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as sock:
        if before:
            sock.sendall(before)
            first = sock.recv(1 << 16)
            while not first.endswith(b"}"):
                first += sock.recv(1 << 16)
            assert first.startswith(b"HTTP/1.1 200 ")
        error = refusal_in(drip(sock, b"GET /v1/models HTTP/1.1\r\nX-Long: " + b"a" * 10_000))
    assert (error["type"], error["code"]) == ("timeout", "request_timeout")


def test_who_connects_and_says_nothing_is_told_nothing(impatient: Live):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as sock:
        assert drip(sock, b"") == b""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_body_that_hardly_comes_is_refused(impatient: Live, path):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as sock:
        sock.sendall(HEAD % (path.encode(), 100_000))
        error = refusal_in(drip(sock, b" " * 10_000))
    assert (error["type"], error["code"]) == ("timeout_error" if "messages" in path else "timeout", error.get("code"))
    assert str(MIN_BYTES_SENT) in error["message"]
    assert impatient.metric(f'http_requests_total{{handler="{path}",method="POST",status="408"}}') == 1


def test_a_body_whose_answer_is_out_must_end_too(impatient: Live):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as sock:
        sock.sendall((HEAD % (b"/v1/completions", 100_000)).replace(b"application/json", b"text/plain"))
        raw = drip(sock, b" " * 10_000)
    assert raw.startswith(b"HTTP/1.1 415 ")
    assert raw.count(b"HTTP/1.1 ") == 1


def test_a_slow_but_steady_body_and_an_idle_connection_are_served(impatient: Live):
    """The body takes several times the limit, and so does the pause between two requests."""
    padded = BODY + b" " * (4 * MIN_BYTES_SENT)
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as sock:
        for pause_s in (0.0, 2 * LIMIT_S):
            time.sleep(pause_s)
            sock.sendall(HEAD % (b"/v1/completions", len(padded)))
            for at in range(0, len(padded), MIN_BYTES_SENT):
                sock.sendall(padded[at : at + MIN_BYTES_SENT])
                time.sleep(LIMIT_S / 2)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_long_answer_is_not_the_sender_s_slowness(start):
    live: Live = start({"step_s": 0.02}, slow_sender_timeout_s=0.2)
    answer = live.complete(prompt="Hello", max_tokens=50, ignore_eos=True, stream=True)
    assert answer.content.endswith(b"data: [DONE]\n\n")


def test_no_limit_for_slow_senders_is_no_limit(start):
    live: Live = start(slow_sender_timeout_s=0)
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        raw = HEAD % (b"/v1/completions", len(BODY)) + BODY
        for piece in (raw[:10], raw[10:60], raw[60:-5], raw[-5:]):
            sock.sendall(piece)
            time.sleep(0.2)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
