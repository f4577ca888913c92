"""Probes answer within a quarter of a second, whatever the engine is doing: server, load and prober are a process each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.spawning import Probes, Spawned, probing, serving

LIMIT_S = 0.25
# A machine that is busy with something else may hold up this process or that one for a while: there, nine in ten within the limit,
# and none so late as if it had waited for five megabytes to be tokenized.  On a quiet one (`-m slow`) every probe is held to the limit.
LATEST_S = 2.0
LATEST = pytest.mark.parametrize("latest_s", [LATEST_S, pytest.param(LIMIT_S, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def server(tiny_llama) -> Iterator[Spawned]:
    with serving(tiny_llama, "--num-kv-blocks", "256") as spawned:
        yield spawned


def check(probes: Probes, latest_s: float) -> None:
    all_s = probes.sorted_s()
    usual_s, longest_s = all_s[len(all_s) * 9 // 10], all_s[-1]
    print(f"\n{probes.num_rounds} rounds, nine in ten within {usual_s:.3f} s, longest {longest_s:.3f} s")
    assert probes.statuses == {"/livez": [200], "/readyz": [200]}
    assert probes.num_rounds >= 10
    assert usual_s < LIMIT_S
    assert longest_s < latest_s


POST = """
import httpx, sys
prompt = "the quick brown fox jumps over the lazy dog " * 120_000
for _ in range(2):
    answer = httpx.post(sys.argv[1] + "/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 1}, timeout=280)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text
"""


@LATEST
def test_probes_answer_while_a_prompt_of_5_mb_is_tokenized(server: Spawned, latest_s: float):
    with probing(server.port) as probes:
        subprocess.run([sys.executable, "-c", POST, f"http://127.0.0.1:{server.port}"], check=True, timeout=300)
    check(probes, latest_s)


LOAD = """
import httpx, sys, time
from concurrent.futures import ThreadPoolExecutor

def stream(index):
    if index < 32:
        time.sleep(index * 0.02)  # the load is that of so many streams, not that of their all coming in the same instant
    body = {"model": "m", "prompt": f"{index} and on", "max_tokens": 100, "ignore_eos": True, "stream": True}
    answer = httpx.post(sys.argv[1] + "/v1/completions", json=body, timeout=280)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\\n\\n")

with ThreadPoolExecutor(32) as pool:
    list(pool.map(stream, range(96)))
"""


@LATEST
def test_probes_answer_under_full_load(server: Spawned, latest_s: float):
    with probing(server.port) as probes:
        subprocess.run([sys.executable, "-c", LOAD, f"http://127.0.0.1:{server.port}"], check=True, timeout=300)
    check(probes, latest_s)
