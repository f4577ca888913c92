"""What --journal costs: the same streams from two servers that differ in nothing else, in alternating rounds."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from tests.bench.light_client import exchange
from tests.server.spawning import serving

pytestmark = pytest.mark.slow

MOST_COST = 0.03


def round_s(port: int, num_streams: int, num_tokens: int) -> float:
    body = {
        "model": "m", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"resumable": True},
    }  # fmt: skip

    async def all_of_them() -> None:
        asked = (exchange(port, {**body, "prompt": f"This is the story of number {number}."}) for number in range(num_streams))
        for reply in await asyncio.gather(*asked):
            assert reply.status == 200
            assert b"data: [DONE]\n\n" in reply.body

    started_s = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - started_s


def test_a_journal_costs_at_most_three_percent(smollm2_path: Path, tmp_path: Path):
    flags = ("--num-kv-blocks", "512", "--stream-keep", "1")
    with (
        serving(smollm2_path, *flags, cpu_threads=None) as plain,
        serving(smollm2_path, *flags, "--journal", str(tmp_path / "journal"), cpu_threads=None) as journalled,
    ):
        ports = (plain.port, journalled.port)
        costs = {}
        for num_streams, num_tokens, num_rounds in ((8, 128, 11), (32, 64, 9)):
            ratios = []
            for number in range(-1, num_rounds):
                # Whoever comes first in a round changes, since a machine's pace drifts.
                order = ports if number % 2 else ports[::-1]
                took_s = {port: round_s(port, num_streams, num_tokens) for port in order}
                if number >= 0:  # the first warms up
                    ratios.append(took_s[journalled.port] / took_s[plain.port])
            costs[num_streams] = statistics.median(ratios) - 1
            print(f"\n{num_streams} streams: {costs[num_streams]:+.1%}; rounds {[f'{ratio - 1:+.1%}' for ratio in sorted(ratios)]}")
    assert max(costs.values()) <= MOST_COST
