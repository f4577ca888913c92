"""What can happen to a stream: its reader leaves, its engine fails, nothing comes for a while."""

from __future__ import annotations

import json
import re
import socket

import httpx
import pytest

from pagestream.engine import FinishReason
from tests.server.conftest import Live, events_of, refusal_of

STORY = {"prompt": "A long story", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def read_events(sock: socket.socket, number: int) -> bytes:
    raw = b""
    while raw.count(b"data: ") < number:
        piece = sock.recv(4096)
        assert piece, raw
        raw += piece
    return raw


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 7])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "temperature": 1, "seed": 1}, {"prompt": ["One", "Two", "Three"]}], ids=["one", "n", "batch"]
)
def test_a_reader_who_leaves_ends_its_sequences_without_a_further_step(start, num_chunks, fields):
    live: Live = start({"step_s": 0.01})
    sock = live.connect({**STORY, **fields, "stream": True})
    read_events(sock, num_chunks)
    live.until(lambda: bool(live.engine.streams), "admitted")

    def pause() -> int:
        live.engine.is_paused = True
        return sum(stream.num_output_tokens for stream in live.engine.streams)

    num_tokens = live.on_loop(pause)
    sock.close()
    live.until(lambda: not live.engine.streams, "aborted")
    assert sum(tokens for _, _, tokens in live.engine.ended) == num_tokens
    assert all(reason is FinishReason.ABORT for _, reason, _ in live.engine.ended)
    assert live.metric("vllm:num_requests_running") == 0
    assert live.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == len(live.engine.ended)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reader_of_a_whole_answer_may_leave_too(start, path):
    live: Live = start({"step_s": 0.01})
    body = {**STORY, "messages": [{"role": "user", "content": "a"}]}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    sock = live.connect(body, path)
    live.until(lambda: bool(live.engine.streams) and live.engine.streams[0].num_output_tokens > 2, "running")
    sock.close()
    live.until(lambda: not live.engine.streams, "aborted")
    assert live.engine.ended[0][1] is FinishReason.ABORT
    live.until(lambda: live.metric(f'http_requests_total{{handler="{path}",method="POST",status="499"') == 1, "counted")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_who_leaves_before_admission_leaves_nothing(start, stream):
    live: Live = start()
    live.engine.admission_s = 0.2
    sock = live.connect({**STORY, "stream": stream})
    live.until(lambda: live.engine.num_asked == 1, "on its way in")
    sock.close()
    live.until(lambda: live.metric('http_requests_total{handler="/v1/completions",method="POST",status="499"') == 1, "counted")
    assert live.on_loop(lambda: list(live.engine.streams)) == []
    assert live.complete(prompt="Hello", max_tokens=1).status_code == 200


def test_chunks_arrive_before_the_end(start):
    live: Live = start({"step_s": 0.02})
    sock = live.connect({**STORY, "stream": True})
    read_events(sock, 3)
    assert live.engine.streams
    assert live.engine.streams[0].num_output_tokens < 200
    sock.close()


def test_a_slow_reader_slows_nobody_and_gets_it_all(start):
    live: Live = start({"context": 100_000, "step_s": 0.0002})
    slow = live.connect(
        {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "n": 4, "logprobs": 15, "stream": True}
    )
    live.until(lambda: bool(live.engine.streams), "admitted")
    assert live.complete(prompt="Hello", max_tokens=5).status_code == 200
    assert live.engine.streams, "the other answer came while this one was computed"
    live.until(lambda: not live.engine.streams, "the slow reader's answer is computed without it", 60)
    raw = b""
    while b"[DONE]" not in raw[-40:]:
        raw += slow.recv(1 << 20)
    texts = {}
    for line in re.findall(rb"data: (\{.*\})", raw):
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], 0) + len(
                choice["logprobs"]["tokens"] if choice["logprobs"] else []
            )
    assert texts == dict.fromkeys(range(4), 2000)
    slow.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_failure_in_the_stream_is_one_error_event_then_done(live: Live, path):
    fields = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = live.post(path, **fields, max_tokens=20, ignore_eos=True, stream=True, x_fault={"kind": "raise", "at_token": 5})
    *chunks, last = events_of(response)
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "request_failed")
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


def test_a_failure_of_a_whole_answer_is_a_500_that_is_not_to_be_repeated(live: Live):
    response = live.complete(prompt=["a", "b"], max_tokens=20, x_fault={"kind": "raise", "at_token": 5})
    assert refusal_of(response, 500)["code"] == "request_failed"
    assert response.headers["x-should-retry"] == "false"
    live.until(lambda: not live.engine.streams, "the other prompt is aborted")


def test_the_engines_end_reaches_every_stream_and_the_probes(start):
    live: Live = start({"step_s": 0.01})
    sock = live.connect({**STORY, "stream": True})
    raw = read_events(sock, 3)
    live.on_loop(live.engine.die)
    while b"[DONE]" not in raw:
        raw += sock.recv(4096)
    assert raw.count(b'data: {"error"') == 1
    sock.close()
    for path in ("/health", "/livez", "/readyz"):
        assert live.client.get(path).status_code == 503
    response = live.complete(prompt="a")
    assert refusal_of(response, 503)["code"] == "engine_dead"
    assert int(response.headers["retry-after"]) >= 1


def test_a_bug_in_a_stream_is_an_error_event_without_its_words(start, monkeypatch):
    live: Live = start()
    monkeypatch.setattr("pagestream.server.completions.CompletionAnswer.chunk_choices", lambda self, piece: [][piece.index + 5])
    last = events_of(live.complete(prompt="a", stream=True))[-1]
    assert last["error"]["code"] == "internal_error"
    assert "index" not in last["error"]["message"]
    assert live.on_loop(lambda: list(live.engine.streams)) == []


def test_a_bug_in_a_route_is_a_500_envelope(start, monkeypatch):
    live: Live = start()
    monkeypatch.setattr("pagestream.server.completions.read_request", lambda *_: 1 / 0)
    response = live.complete(prompt="a")
    assert refusal_of(response, 500)["code"] == "internal_error"
    assert response.headers["x-should-retry"] == "false"


def test_keep_alive_comments_come_while_nothing_else_does(start):
    live: Live = start(sse_keep_alive_interval_s=0.05)
    live.engine.is_paused = True
    with live.client.stream("POST", "/v1/completions", json={"model": "m", **STORY, "max_tokens": 2, "stream": True}) as response:
        raw, pieces = b"", response.iter_raw()
        while raw.count(b": keep-alive\n") < 2:
            raw += next(pieces)
        assert b"data: " not in raw
        live.engine.is_paused = False
        raw += b"".join(pieces)
    assert b"id:" not in raw
    lines = [line for line in raw.split(b"\n") if line and not line.startswith(b":")]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"


def test_many_streams_at_once_are_each_whole(start):
    live: Live = start()
    alone = {
        i: live.complete(**{**STORY, "prompt": f"Story {i}", "max_tokens": 40}).json()["choices"][0]["text"] for i in range(24)
    }
    socks = {i: live.connect({**STORY, "prompt": f"Story {i}", "max_tokens": 40, "stream": True}) for i in alone}
    for i, sock in socks.items():
        raw = b""
        while b"[DONE]" not in raw:
            raw += sock.recv(65536)
        lines = re.findall(rb"data: (\{.*\})", raw)
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == alone[i]
        sock.close()


def test_the_connection_lives_on_after_a_stream(live: Live):
    with httpx.Client(base_url=live.url, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(3):
            assert (
                client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2, "stream": True}).status_code
                == 200
            )
            assert client.post("/v1/completions", json={"model": "m", "prompt": "", "stream": True}).status_code == 400
