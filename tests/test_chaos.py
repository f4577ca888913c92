"""Everything at once: clients that leave, dawdle, lie and break, and the promise that nobody else notices.

The short version runs with all tests; `-m slow` has one of three minutes, which `.ci/run` adds, and one of thirty.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, served
from tests.server.test_resumable import parsed

NUM_CLIENTS = 32
WARM_UP_ACTS = 400  # by work, not by time: what the first requests allocate must have been allocated
KEPT_S = 1.0  # short, so that an end waits for no more
LONG_S = 60  # in which everybody has left on any machine
COMPLETIONS = "/v1/completions"
MALFORMED = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "m"}', b'{"model": "m", "prompt": ""}', b'{"model":"m","prompt":[99999]}',
    b'{"model":"m","prompt":"a","max_tokens":-1}', b'{"model":"m","prompt":"a","n":1e99}', b"[" * 5000 + b"]" * 5000,
    b'{"model":"m","prompt":"a","temperature":NaN}', b'{"model":"nobody","prompt":"a"}', b'{"model":"m","prompt":"\\ud800"}',
]  # fmt: skip

FAULTS = [("nan", "forward")] + [(kind, stage) for kind in ("raise", "oom", "slow", "hang") for stage in ("forward", "sample", "judge")]


def reference_bodies() -> list[dict[str, Any]]:
    choose = random.Random(7)
    bodies: list[dict[str, Any]] = []
    for index in range(20):
        words = [choose.choice(["the", "quick", "fox", "lazy", "dog", "京都", "é", "over"]) for _ in range(choose.randint(1, 40))]
        body = {"model": "m", "prompt": " ".join(words), "max_tokens": choose.randint(1, 48), "ignore_eos": True}
        body |= {"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}
        if index % 5 == 0:
            body |= {"n": 2}
        if index % 7 == 0:
            body |= {"frequency_penalty": 0.5}
        bodies.append(body)
    return bodies


class Chaos:
    """The clients.  `counts` says what they did; a broken promise is an AssertionError of theirs."""

    def __init__(self, live: Live, solo: list[list[str]], seed: int):
        self.live = live
        self.solo = solo
        self.bodies = reference_bodies()
        self.choose = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.num_acts = 0
        self.faults = itertools.cycle(FAULTS)  # in turn, so that also a short run has all of them

    async def run(self, seconds: float, least_acts: int = 0) -> None:
        """So long, and until so much is done."""
        end_s = asyncio.get_running_loop().time() + seconds
        limits = httpx.Limits(max_connections=NUM_CLIENTS + 8)
        async with httpx.AsyncClient(base_url=self.live.url, timeout=280, limits=limits) as client:

            async def one() -> None:
                acts = [self.whole, self.whole, self.stream, self.stream, self.resume, self.leave, self.dawdle, self.lie, self.fault, self.hurry]
                while asyncio.get_running_loop().time() < end_s or self.num_acts < least_acts:
                    act = self.choose.choice(acts)
                    await act(client)
                    self.counts[act.__name__] += 1
                    self.num_acts += 1

            await asyncio.gather(*(one() for _ in range(NUM_CLIENTS)))

    def pick(self) -> tuple[int, dict[str, Any]]:
        index = self.choose.randrange(len(self.bodies))
        return index, self.bodies[index]

    def check(self, index: int, events: list[str]) -> None:
        texts: dict[int, str] = {}
        for data in events:
            if data == "[DONE]":
                continue
            body = json.loads(data)
            assert "error" not in body, body
            for choice in body["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert [texts[at] for at in sorted(texts)] == self.solo[index]

    async def whole(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        assert [choice["text"] for choice in answer.json()["choices"]] == self.solo[index]

    async def stream(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        answer = await client.post(COMPLETIONS, json={**body, "stream": True})
        self.check(index, [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")])
        assert answer.text.endswith("data: [DONE]\n\n")

    async def resume(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        raw, wanted = b"", self.choose.randint(1, 20)
        async with client.stream("POST", COMPLETIONS, json={**body, "stream": True, "stream_options": {"resumable": True}}) as answer:
            async for piece in answer.aiter_raw():
                raw += piece
                if raw.count(b"\n\n") >= wanted:
                    break
        left_s = asyncio.get_running_loop().time()
        events = parsed(raw)
        path = f"/v1/streams/{json.loads(events[0][1])['id']}"
        rest = await client.get(path, headers={"Last-Event-ID": events[-1][0]})
        if rest.status_code == 404 and asyncio.get_running_loop().time() - left_s >= KEPT_S:
            self.counts["came back too late"] += 1  # the machine stood still meanwhile
            return
        assert rest.status_code in (200, 204), rest.text
        self.check(index, [data for _, data in events + parsed(rest.content)])

    async def leave(self, client: httpx.AsyncClient) -> None:
        """In the queue, in the prompt, or in the answer."""
        _, body = self.pick()
        try:
            async with asyncio.timeout(self.choose.random() * 0.3):
                async with client.stream("POST", COMPLETIONS, json={**body, "stream": True, "max_tokens": 100}) as answer:
                    async for _ in answer.aiter_raw():
                        pass
        except TimeoutError:
            pass

    async def dawdle(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        events = b""
        async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            async for piece in answer.aiter_raw(64):
                events += piece
                await asyncio.sleep(0.005)
        self.check(index, [line[6:].decode() for line in events.split(b"\n\n") if line.startswith(b"data: ")])

    async def lie(self, client: httpx.AsyncClient) -> None:
        raw = self.choose.choice(MALFORMED)
        answer = await client.post(COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (raw[:80], answer.status_code)

    async def fault(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        kind, stage = next(self.faults)
        fault = {"kind": kind, "stage": stage, "at_token": self.choose.randint(0, body["max_tokens"] - 1), "seconds": 0.1}
        answer = await client.post(COMPLETIONS, json={**body, "x_fault": fault})
        self.counts[f"{kind} in {stage}"] += 1
        if kind in ("slow", "hang"):
            assert [choice["text"] for choice in answer.json()["choices"]] == self.solo[index]
        else:
            assert answer.status_code == 500, (fault, answer.text)

    async def hurry(self, client: httpx.AsyncClient) -> None:
        index, body = self.pick()
        answer = await client.post(COMPLETIONS, json={**body, "timeout_s": self.choose.choice([0.001, 0.05, 0.2])})
        assert answer.status_code in (200, 408, 429), answer.text
        if answer.status_code == 200:
            for choice in answer.json()["choices"]:
                # Half a character at the end of a cut text shows as U+FFFD.
                assert self.solo[index][choice["index"]].startswith(choice["text"].rstrip("\ufffd"))


@pytest.fixture
def live(tiny_llama: Path) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(
        model=str(tiny_llama), num_kv_blocks=32, swap_space=0.01, preemption_mode="swap", max_num_seqs=16, max_num_batched_tokens=96,
        cpu_threads=1, enable_fault_injection=True,
    )  # fmt: skip
    engine = AsyncLLMEngine.from_engine_args(args, metrics)
    logging.disable(logging.ERROR)  # each injected fault would write its stack
    with served(engine, metrics, stream_keep_s=KEPT_S, stream_resume_timeout_s=KEPT_S, stream_memory_bytes=1 << 30) as server:
        yield server
    logging.disable(logging.NOTSET)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle(live: Live) -> None:
    """Everybody has left: nothing may be left of them."""
    engine = live.engine
    live.until(lambda: not engine._streams and not engine._engine.has_unfinished_requests(), "idle", LONG_S)  # type: ignore[attr-defined]
    live.until(lambda: not live.on_loop(lambda: len(shared_of(live))), "nothing is kept", LONG_S)
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert live.metric(f"vllm:{name}") == 0
    blocks = engine._engine.scheduler.blocks  # type: ignore[attr-defined]
    blocks.check()
    assert blocks.device.num_free == blocks.device.num_blocks
    assert blocks.host.num_free == blocks.host.num_blocks
    gc.collect()


def shared_of(live: Live) -> dict[str, Any]:
    return live.app.state.server.shared_answers._by_id  # type: ignore[attr-defined]


def run_chaos(live: Live, seconds: float, seed: int) -> None:
    engine = live.engine
    admitted: list[str] = []
    admit = engine._admit  # type: ignore[attr-defined]
    engine._admit = lambda request: (admitted.append(request.request_id), admit(request))[1]  # type: ignore[attr-defined]
    ended: list[str] = []
    metrics = live.app.state.server.metrics
    count_end = metrics.request_finished
    metrics.request_finished = lambda stats: (ended.append(stats.request_id), count_end(stats))[1]
    solo = []
    for body in reference_bodies():
        answer = live.client.post(COMPLETIONS, json=body)
        solo.append([choice["text"] for choice in answer.json()["choices"]])
    chaos = Chaos(live, solo, seed)
    asyncio.run(chaos.run(0, WARM_UP_ACTS))
    settle(live)
    num_files, num_bytes = num_open_files(), resident_bytes()
    asyncio.run(chaos.run(seconds, 2 * WARM_UP_ACTS))
    settle(live)
    for body, texts in zip(reference_bodies(), solo, strict=True):
        assert [choice["text"] for choice in live.client.post(COMPLETIONS, json=body).json()["choices"]] == texts
    live.until(lambda: num_open_files() <= num_files * 1.05, "file descriptors are back", LONG_S)
    assert resident_bytes() <= num_bytes * 1.05
    # Each request that was admitted has ended once, and was then counted under one reason.
    assert Counter(ended) == Counter(set(admitted))
    assert len(admitted) == live.metric("vllm:request_success_total")
    acts = ("whole", "stream", "resume", "leave", "dawdle", "lie", "fault", "hurry")
    assert all(chaos.counts[what] for what in (*acts, *(f"{kind} in {stage}" for kind, stage in FAULTS))), chaos.counts
    counters = engine._engine.scheduler.counters  # type: ignore[attr-defined]
    assert counters.num_preempted_swap > 0, "nobody had to give way"
    print(f"\n{len(admitted)} requests admitted; {dict(sorted(chaos.counts.items()))}")
    assert not engine.is_dead


def test_chaos_leaves_nothing_behind_and_touches_nobody_else(live: Live):
    run_chaos(live, 15, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [3, 30])
def test_long_chaos(live: Live, minutes: int):
    run_chaos(live, minutes * 60, seed=minutes)
