"""The wire below the routes: what is no request, and what HTTP allows though few send it."""

from __future__ import annotations

import json
import socket

import pytest

from tests.server.conftest import Live

BODY = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1}).encode()


def exchange(live: Live, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and the rest of what comes until the server closes or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        for piece in pieces:
            sock.sendall(piece)
        raw = b""
        while piece := sock.recv(1 << 16):
            raw += piece
    head, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split(" ")[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}, rest


def post(target: str, *more: str, body: bytes = BODY) -> bytes:
    lines = [f"POST {target} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 200_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n", 400),
    ],
    ids=["words", "tls", "no host", "huge", "two lengths", "negative", "length and chunks"],
)
def test_what_is_no_request_gets_the_envelope_too(live: Live, raw, status):
    try:
        got, headers, body = exchange(live, raw)
    except ConnectionResetError:
        assert status == 431, "only what was never read may take the answer with it"
        return
    assert (got, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert error["message"].startswith("no valid HTTP request: ")


def test_garbage_after_an_answer_has_begun_is_no_second_answer(live: Live):
    """The refusal comes before the body is read, which then turns out to be none."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(head)
        raw = b""
        while b'"unsupported_media_type"' not in raw:
            raw += sock.recv(1 << 16)
        sock.sendall(b"zz\r\n")
        while piece := sock.recv(1 << 16):
            raw += piece
    assert raw.count(b"HTTP/1.1 ") == 1
    assert live.complete(prompt="Hello", max_tokens=1).status_code == 200


@pytest.mark.parametrize("target", ["http://x/v1/completions", "HTTPS://some.where:8000/v1/completions", "/v1/completions"])
def test_an_address_in_full_is_its_path(live: Live, target):
    status, _, body = exchange(live, post(target))
    assert (status, json.loads(body)["object"]) == (200, "text_completion")


@pytest.mark.parametrize("target", ["http://x", "ftp://x/v1/completions", "*"])
def test_an_address_of_nothing_here_is_not_found(live: Live, target):
    status, _, body = exchange(live, post(target))
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


def test_a_body_may_come_in_chunks_and_wait_to_be_asked_for(live: Live):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(BODY[at : at + 7]), BODY[at : at + 7]) for at in range(0, len(BODY), 7))
    status, _, body = exchange(live, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), chunks, b"0\r\nX-Trailer: a\r\n\r\n")
    assert (status, json.loads(body)["object"]) == (200, "text_completion")
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(f"{head}Content-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_requests_sent_ahead_are_answered_in_their_order(live: Live):
    first, second = post("/v1/completions").replace(b"Connection: close\r\n", b""), b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    _, _, rest = exchange(live, first + second + post("/v1/nowhere"))
    answers = rest.split(b"HTTP/1.1 ")
    assert json.loads(answers[0])["object"] == "text_completion"
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"404"]


def test_the_oldest_clients_get_an_answer_that_ends_with_the_connection(live: Live):
    raw = post("/v1/completions", body=BODY[:-1] + b',"stream":true}').replace(b"HTTP/1.1", b"HTTP/1.0")
    status, headers, body = exchange(live, raw)
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["Content-Type", "Authorization", "X-Api-Key", "Idempotency-Key", "X-Request-Timeout"])
def test_a_header_of_which_only_one_can_be_meant_is_refused_by_its_name_when_it_comes_twice(live: Live, name):
    value = "application/json" if name == "Content-Type" else "5"
    status, _, body = exchange(live, post("/v1/completions", f"{name}: {value}", f"{name}: 6"))
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, name)


def test_an_offer_of_another_protocol_is_passed_over(live: Live, caplog):
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    raw = "\r\n".join([*head, "Content-Type: application/json", f"Content-Length: {len(BODY)}", "", ""]).encode() + BODY
    status, _, body = exchange(live, raw)
    assert (status, json.loads(body)["object"]) == (200, "text_completion")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
