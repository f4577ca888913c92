"""The live view: consistent with the metrics while requests run, whole again from its deltas, and free when nobody looks."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.live import Watcher, changed_items, delta
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, refusal_of, served
from tests.tiny_models import make_checkpoint

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """So few blocks that requests must give way, and a swap pool for those who do."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")
    metrics = Metrics("m")
    args = EngineArgs(
        model=str(folder), num_kv_blocks=NUM_BLOCKS, max_num_seqs=16, device="cpu", cpu_threads=1, swap_space=0.01, preemption_mode="swap"
    )
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as server:
        yield server


class Mirror:
    """Reads the events in a thread of its own and keeps what they add up to."""

    def __init__(self, live: Live):
        self.live = live
        self.state: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Mirror:
        self._client = httpx.Client(base_url=self.live.url, timeout=60)
        self._thread.start()
        self.live.until(lambda: bool(self.state), "the first event")
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        # The reader may be waiting for a byte: only the end of the connection wakes it.
        self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._client.close()

    def _read(self) -> None:
        try:
            with self._client.stream("GET", "/v1/engine/events") as self._response:
                for line in self._response.iter_lines():
                    if line.startswith("data: "):
                        self.apply(json.loads(line[6:]))
        except (httpx.HTTPError, httpx.StreamError, OSError):
            assert self._is_closed

    def apply(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["kind"])
        if event["kind"] == "full":
            state = {name: event[name] for name in ("engine", "blocks", "swap", "requests")}
        else:
            state = {name: dict(self.state[name]) for name in self.state}
            for name in ("engine", "blocks", "swap"):
                state[name] |= event.get(name, {})
            for number, change in event.get("requests", {}).items():
                before = state["requests"].get(number, {"tables": []})
                if change is None:
                    state["requests"][number] = None
                    continue
                tables = before["tables"]
                if "tables" in change:
                    tables = [
                        (tables[i] if i < len(tables) else [])[:kept] + more for i, (kept, more) in enumerate(change["tables"])
                    ]
                state["requests"][number] = {**before, **change, "tables": tables}
            state = {name: {key: value for key, value in section.items() if value is not None} for name, section in state.items()}
        self.state = state
        self.history.append(state)


def check(state: dict[str, Any]) -> None:
    """Everything that a view says twice, it says alike."""
    for section, total, free, statuses in (
        ("blocks", "num_blocks", "num_free", {"running", "waiting"}),
        ("swap", "num_swap_blocks", "num_swap_free", {"swapped"}),
    ):
        held = {number: block for number, block in state[section].items() if block[1]}
        assert len(held) + state["engine"][free] == state["engine"][total]
        references: dict[str, int] = {}
        for request in state["requests"].values():
            if request["status"] in statuses:
                for block_id in (block_id for table in request["tables"] for block_id in table):
                    references[str(block_id)] = references.get(str(block_id), 0) + 1
        assert references == {number: block[1] for number, block in held.items()}
        assert all((block[0] is None) == (block[1] == 0) for block in state[section].values())


def test_the_blocks_add_up_while_requests_run_and_the_free_count_is_the_metric(live: Live):
    with Mirror(live) as mirror:

        def free_by_metric() -> int:
            return round((1 - live.metric("vllm:kv_cache_usage_perc")) * NUM_BLOCKS)

        def complete(number: int) -> None:
            answer = live.complete(prompt=f"{number} the quick brown fox" * 2, max_tokens=120, ignore_eos=True, n=1 + number % 2)
            assert answer.status_code == 200, answer.text

        pairs = []
        watched = live.engine._live
        answer = watched.between_steps

        def compare() -> None:
            stats = live.engine.stats()  # what the metric shows
            pairs.append((watched.take().device.num_free, stats.num_blocks - stats.num_used_blocks))
            answer()

        watched.between_steps = compare
        with ThreadPoolExecutor(8) as pool:
            for one in [pool.submit(complete, number) for number in range(48)]:
                one.result()
        watched.between_steps = answer
        assert len(pairs) > 20  # whenever a step was awaited: by who came, or looks on
        assert all(view == metric for view, metric in pairs)
        assert min(view for view, _ in pairs) < NUM_BLOCKS / 2
        live.until(lambda: mirror.state["engine"]["num_free"] == NUM_BLOCKS == free_by_metric(), "all free, in both")
        for state in mirror.history:
            check(state)
        assert mirror.kinds[0] == "full"
        assert "delta" in mirror.kinds
        statuses = {request["status"] for state in mirror.history for request in state["requests"].values()}
        assert {"running", "swapped"} <= statuses
        last = mirror.state["engine"]
        assert not mirror.state["requests"]
        assert last["num_preempted"] > 0
        assert last["num_swapped_out_blocks"] >= last["num_swapped_in_blocks"] > 0
        assert last["num_copied_blocks"] > 0
        assert all(last[f"{part}_s"] > 0 for part in ("schedule", "forward", "sample", "detokenize"))
    live.until(lambda: live.engine._live._num_watchers == 0, "nobody looks any more")
    assert live.engine._engine.observer is None


def test_every_event_of_a_second_watcher_adds_up_too(live: Live):
    with Mirror(live) as first:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(live.complete, prompt="a b c", max_tokens=100, ignore_eos=True)
            with Mirror(live) as second:
                answer.result()
                live.until(lambda: second.state["requests"] == {} and second.state == first.state, "the same state")
        assert second.kinds[0] == "full"


def test_it_asks_for_the_key(start):
    keyed = start(api_keys=("secret",))
    refusal_of(keyed.client.get("/v1/engine/events"), 401)


def test_a_delta_has_changed_fields_only():
    old = {"engine": {"now_s": 1, "free": 3}, "blocks": {1: (0, 1, 0)}, "swap": {}, "requests": {7: {"status": "a", "tables": ((1, 2),)}}}
    assert delta(old, {**old, "engine": {"now_s": 2, "free": 3}}) is None
    new = {"engine": {"now_s": 2, "free": 3}, "blocks": {}, "swap": {}, "requests": {7: {"status": "a", "tables": ((1, 5, 6), (1,))}}}
    assert delta(old, new) == {
        "engine": {"now_s": 2}, "blocks": {1: None}, "requests": {7: {"tables": [[1, (5, 6)], [0, (1,)]]}},
    }  # fmt: skip


def test_what_is_gone_is_null():
    assert changed_items({1: "a", 2: "b"}, {2: "c", 3: None}) == {2: "c", 3: None, 1: None}


def test_who_has_not_read_the_last_state_gets_it_and_then_the_end():
    async def read() -> list[bytes | None]:
        watcher = Watcher(None)
        watcher.put(None, {"engine": {}, "blocks": {}, "swap": {}, "requests": {}})
        watcher.end()
        return [await asyncio.wait_for(watcher.next_event(), 60) for _ in range(2)]

    last, end = asyncio.run(read())
    assert last is not None
    assert b'"kind":"full"' in last
    assert end is None
