"""Probes that prove progress, under load and beside a huge prompt; the report of a step that hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, refusal_of, served


@pytest.fixture(scope="module")
def live(tiny_llama) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1, enable_fault_injection=True)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics, stall_timeout_s=0.4) as server:
        yield server


def probed(live: Live, work) -> dict[str, float]:
    """The longest answer of each probe while the work is done."""
    longest = {"/livez": 0.0, "/readyz": 0.0}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=live.url) as client:
        done = pool.submit(work)
        while not done.done():
            for path in longest:
                start_s = time.monotonic()
                assert client.get(path).status_code == 200
                longest[path] = max(longest[path], time.monotonic() - start_s)
        done.result()
    return longest


# The clients share this process with the server, so these two also measure how busy the machine is: not for every run.
@pytest.mark.slow
def test_probes_answer_while_a_prompt_of_5_mb_is_tokenized(live: Live):
    prompt = "the quick brown fox jumps over the lazy dog " * 113_000

    def ask() -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        assert refusal_of(httpx.post(f"{live.url}/v1/completions", json=body, timeout=120))["code"] == "context_length_exceeded"

    longest = probed(live, ask)
    assert max(longest.values()) < 0.25, longest


@pytest.mark.slow
def test_probes_answer_under_load(live: Live):
    def load() -> None:
        with ThreadPoolExecutor(24) as pool:
            for response in pool.map(lambda index: live.complete(prompt=f"{index}", max_tokens=60, ignore_eos=True, stream=True), range(24)):
                assert response.status_code == 200

    longest = probed(live, load)
    assert max(longest.values()) < 0.25, longest


def test_a_step_that_hangs_turns_readiness_off_and_is_reported_once(live: Live, caplog):
    with caplog.at_level(logging.ERROR), ThreadPoolExecutor(1) as pool:
        fault = {"kind": "hang", "at_token": 2, "seconds": 1.2}
        answer = pool.submit(live.complete, prompt="the", max_tokens=4, ignore_eos=True, x_fault=fault)
        live.until(lambda: live.client.get("/readyz").status_code == 503, "not ready")
        assert "stalled" in live.client.get("/readyz").json()["status"]
        assert live.client.get("/livez").status_code == 200
        assert answer.result().status_code == 200
    assert live.client.get("/readyz").status_code == 200
    (report,) = [record.getMessage() for record in caplog.records if "no step has ended" in record.getMessage()]
    assert "pagestream-step" in report
    assert "fault_injection.py" in report


def test_idle_is_not_stalled(live: Live):
    live.complete(prompt="the", max_tokens=1)
    time.sleep(0.6)
    assert live.engine.stalled_s == 0.0
    assert live.client.get("/readyz").status_code == 200
