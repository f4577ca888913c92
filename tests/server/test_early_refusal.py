"""Refusals of a full queue that never reach the application say what the application would have said."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable

import h11
import pytest

from pagestream.server.app import QUEUED
from tests.server.conftest import Live
from tests.server.test_http import exchange, post

FULL = {"max_num_seqs": 0, "max_num_queued": 0}
VARYING = re.compile(rb"(date|x-request-id|request-id|openai-processing-ms): [^\r]*", re.IGNORECASE)


def talk(live: Live, *pieces: bytes) -> bytes:
    """All bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        for piece in pieces:
            sock.sendall(piece)
        raw = b""
        while piece := sock.recv(1 << 16):
            raw += piece
    return raw


def is_early(live: Live, target: str, *headers: tuple[str, str], method: str = "POST") -> bool:
    request = h11.Request(method=method, target=target, headers=[("Host", "x"), *headers])
    return live.on_loop(live.app.state.answer_early, request) is not None


@pytest.mark.parametrize("path", QUEUED)
def test_both_ways_say_the_same(start: Callable[..., Live], path):
    live = start(FULL)
    assert is_early(live, path)
    assert not is_early(live, f"{path}?x")
    early, late = (talk(live, post(target)) for target in (path, f"{path}?x"))
    assert VARYING.sub(rb"\1", early) == VARYING.sub(rb"\1", late)
    head, _, body = early.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nretry-after: 1\r\n" in head
    assert json.loads(body)["error"]["message"] == "the queue is full"
    assert live.metric(f'http_requests_total{{handler="{path}",method="POST",status="429"}}') == 3
    assert live.metric('vllm:admission_rejections_total{engine="0",model_name="m",reason="queue_full"}') == 3


def test_the_clients_own_id_comes_back(start: Callable[..., Live]):
    live = start(FULL)
    response = live.client.post("/v1/messages", content=b"{}", headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"], response.headers["request-id"]) == (429, "mine", "mine")
    assert response.json()["type"] == "error"


def test_what_is_not_plain_goes_the_long_way(start: Callable[..., Live]):
    live = start(FULL, api_keys=("secret",), allowed_origins=("https://chat.example",), root_path="/llm")
    key = ("Authorization", "Bearer secret")
    assert is_early(live, "/v1/completions", key)
    assert is_early(live, "/llm/v1/completions", key)
    for headers in ((), (("Authorization", "Bearer other"),), (key, ("Idempotency-Key", "k")), (key, ("Origin", "https://chat.example"))):
        assert not is_early(live, "/v1/completions", *headers)
    assert not is_early(live, "/v1/completions", key, method="GET")
    assert not is_early(live, "/tokenize", key)
    status, _, _ = exchange(live, post("/v1/completions"))
    assert status == 401
    status, headers, _ = exchange(live, post("/v1/completions", "Authorization: Bearer secret", "Origin: https://chat.example"))
    assert (status, headers["access-control-allow-origin"]) == (429, "https://chat.example")


def test_with_room_nothing_is_refused(start: Callable[..., Live]):
    live = start()
    assert not is_early(live, "/v1/completions")
    assert live.complete(prompt="Hello", max_tokens=1).status_code == 200


@pytest.mark.parametrize("framing", ["Content-Length: 40", "Transfer-Encoding: chunked"])
def test_the_connection_is_good_for_the_next_request(start: Callable[..., Live], framing):
    """The answer comes before the body, which is read and dropped as it arrives; what follows it is a request of its own."""
    live = start(FULL)
    body = b"x" * 40 if "Length" in framing else b"28\r\n" + b"x" * 40 + b"\r\n0\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(head)
        raw = b""
        while b"queue is full" not in raw:
            raw += sock.recv(1 << 16)
        sock.sendall(body[:10])
        sock.sendall(body[10:] + head + body + b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while piece := sock.recv(1 << 16):
            raw += piece
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", raw)] == [429, 429, 200]


def test_who_waits_to_be_told_to_go_on_is_told_no(start: Callable[..., Live]):
    raw = talk(start(FULL), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 40\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 429 ")


def test_a_slow_body_behind_a_refusal_ends_the_connection(start: Callable[..., Live]):
    live = start(FULL, slow_sender_timeout_s=0.2)
    raw = talk(live, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\nx")
    assert raw.startswith(b"HTTP/1.1 429 ")
