"""What the live view costs: 32 streams with and without three readers of it, in alternating rounds on one server.

Only meaningful while nothing else runs.  The load and the readers are processes of their own, which only count and throw away.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS, NUM_READERS = 32, 3
ROUNDS, WINDOW_S, SETTLE_S = 6, 4.0, 1.0

# Streams that go on for longer than the test: who joins and leaves would change the pace more than who looks.
LOAD = """
import json, socket, sys, threading
port, count = int(sys.argv[1]), int(sys.argv[2])
def run(number):
    body = {"model": "smollm2", "prompt": f"{number} " + "once upon a time " * 12, "stream": True, "ignore_eos": True}
    raw = json.dumps({**body, "max_tokens": 6000}).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
                 + f"Content-Length: {len(raw)}\\r\\n\\r\\n".encode() + raw)
    while sock.recv(65536):
        pass
threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
for thread in threads: thread.start()
threads[0].join()
"""
READERS = """
import socket, sys, threading
port, count = int(sys.argv[1]), int(sys.argv[2])
def run():
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"GET /v1/engine/events HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    while sock.recv(1 << 20):
        pass
threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
for thread in threads: thread.start()
threads[0].join()
"""


@contextmanager
def running(program: str, *arguments: object) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)]) as process:
        try:
            yield
        finally:
            process.kill()


def wait_until_ready(url: str) -> None:
    end_s = time.monotonic() + 120
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        assert time.monotonic() < end_s, "the server is not ready"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    command = [sys.executable, "-m", "pagestream.server", "serve", "smollm2", "--port", "0", "--num-kv-blocks", "8000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", process.stdout.readline())
        assert found
        wait_until_ready(f"http://127.0.0.1:{found[1]}/readyz")
        yield int(found[1])
        process.terminate()
        process.wait(60)


def num_tokens(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def tokens_per_s(client: httpx.Client) -> float:
    start_s, start = time.monotonic(), num_tokens(client)
    time.sleep(WINDOW_S)
    end = num_tokens(client)
    return (end - start) / (time.monotonic() - start_s)


def test_three_who_look_cost_less_than_two_percent_of_throughput(port: int):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client, running(LOAD, port, NUM_STREAMS):
        time.sleep(6)  # all streams decode

        ratios = []
        for _ in range(ROUNDS):
            # Alone, watched, watched, alone: contexts grow and the pace falls, which this order favours neither by.
            alone = tokens_per_s(client)
            with running(READERS, port, NUM_READERS):
                time.sleep(SETTLE_S)  # they connect, and get the whole state once
                watched = tokens_per_s(client) + tokens_per_s(client)
            time.sleep(SETTLE_S)
            alone += tokens_per_s(client)
            ratios.append(watched / alone)
            print(f"  alone {alone / 2:.1f}, watched {watched / 2:.1f} tokens/s: {watched / alone:.3f}")
    median = statistics.median(ratios)
    print(f"\nthree readers leave {median:.3f} of the throughput at {NUM_STREAMS} streams")
    assert median > 0.98
