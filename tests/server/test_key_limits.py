"""Limits of each API key: requests at a time, tokens per minute."""

from __future__ import annotations

import pytest

from pagestream.server.errors import HttpError
from pagestream.server.key_limits import KeyLimits
from tests.server.conftest import Live, refusal_of

BODY = {"model": "m", "prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def ask(live: Live, key: str, **fields):
    return live.client.post("/v1/completions", json={**BODY, **fields}, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("options", [{}, {"stream_options": {"resumable": True}}], ids=["plain", "resumable"])
def test_a_key_has_so_many_requests_at_a_time(start, options):
    live: Live = start({"step_s": 0.01, "context": 100_000}, api_keys=("a", "b"), max_requests_per_key=1, stream_resume_timeout_s=0.1)
    head = {"Authorization": "Bearer a"}
    with live.client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 50_000, "stream": True, **options}, headers=head):
        refused = ask(live, "a")
        assert refusal_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(live, "b").status_code == 200
    live.until(lambda: ask(live, "a").status_code == 200, "given back when the reader has left")


WRITTEN = [
    {"Authorization": "bearer a"},
    {"Authorization": "BEARER  a"},
    {"X-Api-Key": "a"},
    {"Authorization": "Basic something", "X-Api-Key": "a"},
]


def test_a_key_is_one_however_it_is_written(start):
    live: Live = start({"step_s": 0.01, "context": 100_000}, api_keys=("a",), max_requests_per_key=1)
    head = {"Authorization": "Bearer a"}
    with live.client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 50_000, "stream": True}, headers=head):
        for path in ("/v1/completions", "/v1/embeddings"):
            body = BODY if path == "/v1/completions" else {"model": "m", "input": "Hello"}
            assert [live.client.post(path, json=body, headers=each).status_code for each in WRITTEN] == [429] * len(WRITTEN)


TURNS = [{"role": "user", "content": "Hello"}]
SHAPES = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 5},
    "/v1/messages": {"messages": TURNS, "max_tokens": 5},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 5},
    "/v1/embeddings": {"input": "Hello"},
}


@pytest.mark.parametrize("path", SHAPES)
def test_the_limits_hold_on_every_route_that_computes(start, path):
    live: Live = start({"step_s": 0.01, "context": 100_000}, api_keys=("a",), max_requests_per_key=1)
    head = {"Authorization": "Bearer a"}
    with live.client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 50_000, "stream": True}, headers=head):
        for stream in ({}, {"stream": True}) if path != "/v1/embeddings" else ({},):
            refused = live.client.post(path, json={"model": "m", **SHAPES[path], **stream}, headers=head)
            assert (refused.status_code, refused.headers["retry-after"] >= "1") == (429, True)
    live.until(lambda: live.client.post(path, json={"model": "m", **SHAPES[path]}, headers=head).status_code == 200, "given back")
    assert live.client.post(path, json={"model": "m", **SHAPES[path]}, headers=head).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_an_idempotency_key_is_refused_by_name_where_it_has_no_effect(start, path):
    live: Live = start()
    refused = live.client.post(path, json={"model": "m", **SHAPES[path]}, headers={"Idempotency-Key": "k"})
    assert refused.status_code == 400
    assert "Idempotency-Key is not supported here" in refused.json()["error"]["message"]


def test_a_refused_or_failed_request_gives_its_place_back(start):
    live: Live = start(api_keys=("a",), max_requests_per_key=1)
    for fields in ({"max_tokens": 9999}, {"x_fault": {"kind": "raise"}}, {"stream": True, "x_fault": {"kind": "raise"}}, {}):
        ask(live, "a", **fields)
    assert ask(live, "a").status_code == 200


def test_a_key_has_so_many_tokens_a_minute(start):
    live: Live = start(api_keys=("a", "b"), max_tokens_per_minute_per_key=25)
    assert [ask(live, "a").status_code for _ in range(4)] == [200, 200, 200, 429]  # ten tokens each
    assert 1 <= int(ask(live, "a").headers["retry-after"]) <= 60
    assert ask(live, "b").status_code == 200


def test_the_window_moves():
    now_s = 0.0
    limits = KeyLimits(None, 10, lambda: now_s)
    limits.take("a").give_back(10)
    with pytest.raises(HttpError):
        limits.take("a")
    now_s = 61.0
    limits.take("a").give_back(3)


def test_no_more_than_a_minute_is_remembered_where_there_is_no_limit():
    now_s = 0.0
    limits = KeyLimits(None, None, lambda: now_s)
    for second in range(1000):
        now_s = float(second)
        limits.take("a").give_back(10)
    account = limits._accounts["a"]
    assert len(account.spent) == 61
    assert account.num_tokens(now_s) == 610
