"""timeout_s and X-Request-Timeout on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, events_of, refusal_of, served

TIMEOUT_S = 1.0  # long enough for five tokens on any machine
SLOW = {"kind": "slow", "at_token": 5, "seconds": 1.5}
STORY = {"prompt": "the quick brown", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tiny_llama) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1, enable_fault_injection=True)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as server:
        yield server


def test_an_answer_ends_with_what_there_is_and_says_why(live: Live):
    full = live.complete(**STORY).json()["choices"][0]["text"]
    counter = 'vllm:request_success_total{engine="0",finished_reason="deadline"'
    before = live.metric(counter)
    body = live.complete(**STORY, timeout_s=TIMEOUT_S, x_fault=SLOW).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 5 <= body["usage"]["completion_tokens"] <= 6
    assert full.startswith(choice["text"].rstrip("\ufffd"))
    live.until(lambda: live.metric(counter) == before + 1, "counted")  # by the engine, once its slow step has ended


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_so_does_a_stream(live: Live, path):
    fields = {**STORY, "messages": [{"role": "user", "content": "a"}]}
    fields.pop("messages" if path == "/v1/completions" else "prompt")
    *_, last, usage = events_of(
        live.post(path, **fields, stream=True, stream_options={"include_usage": True}, timeout_s=TIMEOUT_S, x_fault=SLOW)
    )
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("length", "deadline")
    assert 5 <= usage["usage"]["completion_tokens"] <= 6


def test_a_whole_answer_without_any_token_is_a_408(live: Live):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(live.complete, **STORY, x_fault={**SLOW, "at_token": 1, "seconds": 2.0})
        live.until(lambda: live.engine.stalled_s > 0.05, "the other's step is slow")
        refusal = refusal_of(live.complete(**STORY, timeout_s=0.1), 408)
        assert (refusal["type"], refusal["code"]) == ("timeout", "deadline_exceeded")
        assert other.result().json()["usage"]["completion_tokens"] == 200


def test_the_header_says_the_same_and_the_lesser_counts(live: Live):
    for header, timeout_s in ((str(TIMEOUT_S), 60), ("60", TIMEOUT_S)):
        response = live.client.post(
            "/v1/completions",
            json={"model": "m", **STORY, "timeout_s": timeout_s, "x_fault": SLOW},
            headers={"X-Request-Timeout": header},
        )
        assert response.json()["choices"][0]["stop_reason"] == "deadline"


@pytest.mark.parametrize("value", [0, -1, "1", 1e9, True])
def test_a_timeout_out_of_range_is_refused(live: Live, value):
    assert refusal_of(live.complete(**STORY, timeout_s=value))["param"] == "timeout_s"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", ""])
def test_a_header_that_is_no_time_is_refused(live: Live, value):
    response = live.client.post("/v1/completions", json={"model": "m", **STORY}, headers={"X-Request-Timeout": value})
    assert refusal_of(response)["param"] == "X-Request-Timeout"
