"""Readiness that proves progress; the report of a step that hangs.  How fast probes answer: test_probes.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, served


@pytest.fixture(scope="module")
def live(tiny_llama) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=128, cpu_threads=1, enable_fault_injection=True)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics, stall_timeout_s=1.0) as server:
        yield server


def test_a_step_that_hangs_turns_readiness_off_and_is_reported_once(live: Live, caplog):
    with caplog.at_level(logging.ERROR), ThreadPoolExecutor(1) as pool:
        fault = {"kind": "hang", "at_token": 2, "seconds": 4.0}
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
    time.sleep(1.2)
    assert live.engine.stalled_s == 0.0
    assert live.client.get("/readyz").status_code == 200
