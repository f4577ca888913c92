"""Signals and exit codes of a server process."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagestream.server.serving import spare_heap
from tests.server.spawning import Spawned, serving, started

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE_S = 60  # in which what takes no time is done on any machine; what must not be waited for takes ten times as long
STORY = {"model": "m", "prompt": "A long walk", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def spawn() -> Iterator[Callable[..., Spawned]]:
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(started("tests.server.serve_fake", *flags))


def begin(server: Spawned, stack: ExitStack, max_tokens: int) -> Iterator[str]:
    """A stream that has given its first event."""
    response = stack.enter_context(server.client.stream("POST", "/v1/completions", json={**STORY, "max_tokens": max_tokens}))
    lines = response.iter_lines()
    assert next(lines).startswith("data: {")
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_serves_what_runs_and_refuses_the_rest(spawn, number):
    server: Spawned = spawn("--drain-timeout", "60")
    with ExitStack() as stack:
        lines = begin(server, stack, 200)
        server.process.send_signal(number)
        while server.client.get("/readyz").status_code == 200:  # at once: while the stream goes on
            time.sleep(0.002)
        assert server.client.get("/health").status_code == 200
        refused = server.client.post("/v1/completions", json={"model": "m", "prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "server_draining"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert len(rest) > 40
    assert server.process.wait(AT_ONCE_S) == 0


def test_an_idle_server_ends_at_once(spawn):
    server: Spawned = spawn("--drain-timeout", "600")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(AT_ONCE_S) == 0


def test_a_second_signal_ends_at_once(spawn):
    server: Spawned = spawn("--drain-timeout", "600")
    with ExitStack() as stack:
        lines = begin(server, stack, 50_000)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(AT_ONCE_S) == 128 + signal.SIGTERM
        del lines  # held until here: dropping it closes the connection


def test_a_second_signal_ends_even_what_hangs(spawn):
    server: Spawned = spawn("--drain-timeout", "0.1", "--stop-hangs")
    with ExitStack() as stack:
        lines = begin(server, stack, 50_000)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.7)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(AT_ONCE_S) == 128 + signal.SIGTERM
        del lines


def test_a_drain_that_runs_out_tells_its_readers(spawn):
    server: Spawned = spawn("--drain-timeout", "0.5")
    with ExitStack() as stack:
        lines = begin(server, stack, 50_000)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
    assert server.process.wait(AT_ONCE_S) == 0


def test_the_engines_end_is_a_failure_also_while_draining(spawn):
    server: Spawned = spawn("--drain-timeout", "600")
    with ExitStack() as stack:
        lines = begin(server, stack, 50_000)
        server.process.send_signal(signal.SIGTERM)
        while server.client.get("/readyz").status_code == 200:
            time.sleep(0.002)
        server.process.send_signal(signal.SIGUSR1)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
    assert server.process.wait(AT_ONCE_S) == 1


def test_the_engines_end_is_a_failure_of_the_process(spawn):
    server: Spawned = spawn()
    with ExitStack() as stack:
        lines = begin(server, stack, 50_000)
        server.process.send_signal(signal.SIGUSR1)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
    assert server.process.wait(AT_ONCE_S) == 1


def test_what_was_loaded_is_not_walked_by_the_garbage_collector():
    """A full collection of all that a server loads stops every thread for a tenth of a second."""

    def collected_s() -> float:
        started_s = time.thread_time()
        gc.collect()
        return time.thread_time() - started_s

    whole_s = collected_s()
    spare_heap()
    try:
        assert collected_s() < whole_s / 4
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def children_of(pid: int) -> set[int]:
    return {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_real_server_leaves_no_process_and_no_shared_memory(tiny_llama, num_signals):
    shared = set(os.listdir("/dev/shm"))
    with serving(tiny_llama, "--num-kv-blocks", "64", "--enable-fault-injection", "--drain-timeout", "600") as server:
        body = {**STORY, "max_tokens": 30, "x_fault": {"kind": "hang", "at_token": 5, "seconds": 1.5 if num_signals == 1 else 600}}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)  # so that it is in its steps, of which one is going to hang
            children = children_of(server.process.pid)
            for _ in range(num_signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            if num_signals == 1:
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert server.process.wait(AT_ONCE_S) == (0 if num_signals == 1 else 128 + signal.SIGTERM)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert set(os.listdir("/dev/shm")) <= shared
