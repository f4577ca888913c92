"""Ten times as much as the server can take, for a minute: what it can take it still gives, and the rest it refuses at once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench.light_client import Reply, exchange
from tests.server.spawning import probing, serving

pytestmark = pytest.mark.slow

NUM_RUNNING = 8
NUM_QUEUED = 8
WARM_UP_S, CAPACITY_S, OVERLOAD_S = 4.0, 20.0, 60.0
FACTOR = 10
BODY: dict[str, Any] = {"model": "m", "max_tokens": 192, "ignore_eos": True, "temperature": 0}


PROMPT = "The history of the town begins with a small group of people who came over the hills in the spring of that year and " * 3


async def num_generated(port: int) -> float:
    """Tokens that the server has generated since its start."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


async def measure_capacity(port: int, num_clients: int) -> float:
    """Tokens per second while so many clients always have a request going, after a warm-up."""
    is_over = False

    async def one(client: int) -> None:
        number = 0
        while not is_over:
            reply = await exchange(port, {**BODY, "prompt": f"{client} {number} {PROMPT}"})
            assert reply.status == 200, reply.body
            number += 1

    clients = [asyncio.create_task(one(client)) for client in range(num_clients)]
    await asyncio.sleep(WARM_UP_S)
    begun_s, num_before = time.monotonic(), await num_generated(port)
    await asyncio.sleep(CAPACITY_S)
    num_made, took_s = await num_generated(port) - num_before, time.monotonic() - begun_s
    is_over = True
    await asyncio.gather(*clients)
    return num_made / took_s


@dataclass(frozen=True, slots=True)
class Flood:
    """What became of requests that came at a rate; `tokens_per_s` is counted from the first one to the last."""

    replies: list[Reply]
    tokens_per_s: float


async def flood(port: int, rate: float, seconds: float) -> Flood:
    """Requests at this rate whatever becomes of them.  Awake only when one is due: each wake-up takes a core from the server."""
    begun_s, num_before = time.monotonic(), await num_generated(port)
    asked: list[asyncio.Task[Reply]] = []
    while (now_s := time.monotonic() - begun_s) < seconds:
        while len(asked) < now_s * rate:
            asked.append(asyncio.create_task(exchange(port, {**BODY, "prompt": f"asked {len(asked)} {PROMPT}"})))
        await asyncio.sleep(begun_s + len(asked) / rate - time.monotonic())
    num_made, took_s = await num_generated(port) - num_before, time.monotonic() - begun_s
    return Flood(await asyncio.gather(*asked), num_made / took_s)


def test_ten_times_too_much_for_a_minute(smollm2_path: Path):
    flags = ("--max-num-seqs", str(NUM_RUNNING), "--max-num-queued-reqs", str(NUM_QUEUED), "--num-kv-blocks", "512")
    with serving(smollm2_path, *flags, cpu_threads=None) as server:
        capacity = asyncio.run(measure_capacity(server.port, NUM_RUNNING + NUM_QUEUED))
        rate = FACTOR * capacity / BODY["max_tokens"]
        with probing(server.port, between_s=0.25) as probes:
            flooded = asyncio.run(flood(server.port, rate, OVERLOAD_S))
        accepted = [reply for reply in flooded.replies if reply.status == 200]
        refused = [reply for reply in flooded.replies if reply.status != 200]
        goodput = flooded.tokens_per_s / capacity  # all that was begun is finished, as is checked below
        longest_refusal_s = max(reply.took_s for reply in refused)
        print(
            f"\ncapacity {capacity:.0f} tokens/s, goodput {goodput:.0%} of it at {rate:.1f} requests/s; {len(accepted)} accepted, "
            f"{len(refused)} refused, the slowest in {1000 * longest_refusal_s:.0f} ms; probes "
            f"{probes.num_rounds}, the slowest in {1000 * probes.sorted_s()[-1]:.0f} ms"
        )
        for reply in refused:
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (429, "server_overloaded")
            assert b"\r\nretry-after: " in reply.head.lower()
        for reply in accepted:
            body = json.loads(reply.body)
            assert body["usage"]["completion_tokens"] == BODY["max_tokens"]
            assert body["choices"][0]["finish_reason"] == "length"
        assert len(flooded.replies) >= 0.95 * rate * OVERLOAD_S, "the client could not ask so fast"
        assert goodput >= 0.9
        assert longest_refusal_s <= 0.1
        assert probes.statuses == {"/livez": [200], "/readyz": [200]}
        assert probes.sorted_s()[-1] < 0.25
