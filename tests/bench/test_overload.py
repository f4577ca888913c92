"""Ten times as much as the server can take, for a minute: what it can take it still gives, and the rest it refuses at once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.bench.light_client import Reply, exchange
from tests.server.spawning import probing, serving

pytestmark = pytest.mark.slow

NUM_RUNNING = 8
NUM_QUEUED = 8
WARM_UP_S, CAPACITY_S, OVERLOAD_S = 4.0, 20.0, 60.0
FACTOR = 10
BODY = {"model": "m", "max_tokens": 192, "ignore_eos": True, "temperature": 0}


PROMPT = "The history of the town begins with a small group of people who came over the hills in the spring of that year and " * 3


async def run_closed(port: int, num_clients: int, seconds: float) -> float:
    """Requests per second that so many clients get who always have one going; counts what ends in time, each by its part in it."""
    begun_s = time.monotonic()
    end_s = begun_s + seconds
    num_served = 0.0

    async def one(client: int) -> None:
        nonlocal num_served
        number = 0
        while (sent_s := time.monotonic()) < end_s:
            reply = await exchange(port, {**BODY, "prompt": f"{client} {number} {PROMPT}"})
            assert reply.status == 200, reply.body
            num_served += min(1.0, (end_s - sent_s) / reply.took_s)
            number += 1

    await asyncio.gather(*(one(client) for client in range(num_clients)))
    return num_served / seconds


async def run_open(port: int, rate: float, seconds: float) -> list[tuple[float, Reply]]:
    """Requests at this rate whatever becomes of them; each one's moment of sending, from the start, and its reply."""
    begun_s = time.monotonic()
    asked: list[asyncio.Task[tuple[float, Reply]]] = []

    async def one(number: int) -> tuple[float, Reply]:
        sent_s = time.monotonic() - begun_s
        return sent_s, await exchange(port, {**BODY, "prompt": f"{number} {PROMPT}"})

    number = 0
    while (now_s := time.monotonic() - begun_s) < seconds:
        while number < now_s * rate:
            asked.append(asyncio.create_task(one(number)))
            number += 1
        await asyncio.sleep(0.005)
    return await asyncio.gather(*asked)


def test_ten_times_too_much_for_a_minute(smollm2_path: Path):
    flags = ("--max-num-seqs", str(NUM_RUNNING), "--max-num-queued-reqs", str(NUM_QUEUED), "--num-kv-blocks", "512")
    with serving(smollm2_path, *flags, cpu_threads=None) as server:
        asyncio.run(run_closed(server.port, NUM_RUNNING + NUM_QUEUED, WARM_UP_S))
        capacity = asyncio.run(run_closed(server.port, NUM_RUNNING + NUM_QUEUED, CAPACITY_S))
        with probing(server.port, between_s=0.25) as probes:
            replies = asyncio.run(run_open(server.port, FACTOR * capacity, OVERLOAD_S))
        accepted = [(sent_s, reply) for sent_s, reply in replies if reply.status == 200]
        refused = [reply for _, reply in replies if reply.status != 200]
        goodput = sum(sent_s + reply.took_s <= OVERLOAD_S for sent_s, reply in accepted) / OVERLOAD_S
        longest_refusal_s = max(reply.took_s for reply in refused)
        print(
            f"\ncapacity {capacity:.2f} requests/s, offered {len(replies) / OVERLOAD_S:.1f}, goodput {goodput:.2f} = {goodput / capacity:.0%}; "
            f"{len(refused)} refused, the slowest in {1000 * longest_refusal_s:.0f} ms; probes "
            f"{probes.num_rounds}, the slowest in {1000 * max(probes.longest_s.values()):.0f} ms"
        )
        for reply in refused:
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (429, "server_overloaded")
            assert b"\r\nretry-after: " in reply.head.lower()
        for _, reply in accepted:
            body = json.loads(reply.body)
            assert body["usage"]["completion_tokens"] == BODY["max_tokens"]
            assert body["choices"][0]["finish_reason"] == "length"
        assert len(replies) >= 0.95 * FACTOR * capacity * OVERLOAD_S, "the client could not ask so fast"
        assert goodput >= 0.9 * capacity
        assert longest_refusal_s <= 0.1
        assert probes.statuses == {"/livez": [200], "/readyz": [200]}
        assert max(probes.longest_s.values()) < 0.25
