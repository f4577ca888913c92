"""What the server needs of the machine's memory with the default model and a cache of 512 MiB."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.bench.light_client import exchange
from tests.server.spawning import serving

MIB_IN_KB = 1024


def peak_kb(pid: int) -> int:
    """The most that the process ever had in memory, pages of its files included."""
    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found)


async def load(port: int) -> list[int]:
    """Eight streams whose prompts and answers fill a good part of the cache."""
    fields = {"model": "m", "temperature": 0, "max_tokens": 100, "ignore_eos": True, "stream": True}
    asked = [{**fields, "prompt": [100 + (7 * i + j) % 9000 for j in range(1500)]} for i in range(8)]
    return [reply.status for reply in await asyncio.gather(*(exchange(port, one) for one in asked))]


@pytest.mark.slow
def test_the_default_model_with_a_cache_of_512_mib_stays_below_a_gib():
    with serving("smollm2", "--kv-cache-memory", "512M", cpu_threads=None) as server:
        at_start = peak_kb(server.process.pid)
        assert asyncio.run(load(server.port)) == [200] * 8
        peak = peak_kb(server.process.pid)
    print(f"\n{at_start / MIB_IN_KB:.0f} MiB when ready, {peak / MIB_IN_KB:.0f} MiB after eight streams")
    assert peak < 1024 * MIB_IN_KB
