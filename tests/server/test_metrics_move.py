"""A scripted workload on a real engine: every metric of the dashboard and the rules moves, and the books close."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import STEP_PARTS, Metrics
from tests.server.conftest import Live, served
from tests.server.test_dashboard import EXPRESSIONS, RECORDED, names_in
from tests.tiny_models import make_checkpoint

NUM_BLOCKS, NUM_SWAP_BLOCKS, NUM_SEQS, NUM_QUEUED = 24, 6, 6, 16
NUM_REFUSED = 20
FOX = "The quick brown fox jumps over the lazy dog, and the dog looks up and over the fox. "  # more than one block
BLOCK_BYTES = 12_288  # of the small checkpoint
CONSTANT = {"pagestream:kv_blocks": NUM_BLOCKS, "pagestream:swap_blocks": NUM_SWAP_BLOCKS}
NAMES = sorted({name for expression in EXPRESSIONS for name in names_in(expression)} - RECORDED)


@dataclass
class Account:
    """What the clients have seen, and every sample that was scraped meanwhile."""

    usages: list[dict[str, int]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    seen: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))  # name -> sums over its labels
    last: dict[tuple[str, str], float] = field(default_factory=dict)  # (name, a label's value) -> the final value

    def scrape(self, live: Live) -> None:
        sums: dict[str, float] = defaultdict(float)
        last: dict[tuple[str, str], float] = defaultdict(float)
        for family in text_string_to_metric_families(live.client.get("/metrics").text):
            for sample in family.samples:
                sums[sample.name] += sample.value
                for value in sample.labels.values():
                    last[sample.name, value] += sample.value
        for name, value in sums.items():
            self.seen[name].add(value)
        self.last = last

    def complete(self, live: Live, **body: Any) -> dict[str, Any]:
        answer = live.complete(**body)
        self.statuses.append(answer.status_code)
        if answer.status_code == 200:
            self.usages.append(answer.json()["usage"])
        return answer.json()


def resumed_stream(live: Live) -> list[dict[str, Any]]:
    """Cut off after some events and taken up again; the chunks of both parts."""
    body = {"prompt": "A stream", "max_tokens": 40, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"resumable": True, "include_usage": True}
    chunks: list[dict[str, Any]] = []
    last_id = ""
    with live.client.stream("POST", "/v1/completions", json={"model": "m", **body}) as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                last_id = line[4:]
            elif line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
            if len(chunks) >= 3 and last_id:
                break
    with live.client.stream("GET", f"/v1/streams/{chunks[0]['id']}", headers={"Last-Event-ID": last_id}) as response:
        assert response.status_code == 200
        chunks += [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    return chunks


def run_script(live: Live, metrics: Metrics, account: Account) -> None:
    text = account.complete(live, prompt=FOX, max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    account.complete(live, prompt=FOX, max_tokens=30, temperature=0, ignore_eos=True, stop=[text[8:11]])
    account.complete(live, prompt=FOX, temperature=-1)
    account.complete(live, prompt="Two ways", n=3, seed=1, max_tokens=30, ignore_eos=True)  # forks, and copies on write
    live.client.get("/nowhere")
    num_calls = NUM_SEQS + NUM_QUEUED + NUM_REFUSED
    with ThreadPoolExecutor(num_calls) as pool:
        # More than the pool holds at once, and more than may wait.
        bodies = [{"prompt": f"{i} over the lazy dog", "max_tokens": 90, "ignore_eos": True} for i in range(num_calls)]
        calls = [pool.submit(account.complete, live, **body) for body in bodies]
        while not all(call.done() for call in calls):
            account.scrape(live)
            time.sleep(0.02)  # the clients and the engine share one interpreter with who looks
        assert all(call.result() for call in calls)
    for kind in ("nan", "raise"):
        account.complete(live, prompt="A fault", max_tokens=20, ignore_eos=True, x_fault={"kind": kind, "at_token": 3})
    pause = {"kind": "slow", "at_token": 100, "seconds": 2}  # so that the answer does not end before its reader was seen to leave
    with live.connect({"prompt": "Who leaves", "max_tokens": 300, "ignore_eos": True, "stream": True, "x_fault": pause}) as left:
        left.recv(200)
    live.until(lambda: live.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1, "the abort")
    chunks = resumed_stream(live)
    account.usages.append(chunks[-1]["usage"])
    metrics.kernel_compiled()  # as a kernel that was compiled too late would tell


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")
    metrics = Metrics("m")
    # So small a swap pool that some give way to it and the others are computed again.
    args = EngineArgs(
        model=str(folder), num_kv_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQS, max_num_queued_reqs=NUM_QUEUED, device="cpu", cpu_threads=1,
        swap_space=NUM_SWAP_BLOCKS * BLOCK_BYTES / 2**30, preemption_mode="swap", enable_fault_injection=True,
    )  # fmt: skip
    engine = AsyncLLMEngine.from_engine_args(args, metrics)
    account = Account()
    with served(engine, metrics) as live:
        account.scrape(live)
        run_script(live, metrics, account)
        live.until(lambda: live.metric("vllm:num_requests_running") == 0, "the end")
        account.scrape(live)
        yield account
    assert threading.active_count() < 50


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_of_the_dashboard_and_the_rules_exists_and_moves(account: Account, name: str):
    if name == "up":
        return
    assert account.seen[name], f"{name} is not exported"
    if name in CONSTANT:
        assert account.seen[name] == {CONSTANT[name]}
    else:
        assert len(account.seen[name]) > 1, f"{name} was {account.seen[name]} from the start to the end"


def test_each_admitted_request_has_ended_once_under_its_reason(account: Account):
    last = account.last
    num_refused = account.statuses.count(429)
    assert num_refused > 0
    num_admitted = len(account.statuses) - num_refused - account.statuses.count(400) + 2  # who left, and the resumed stream
    ended = {reason: last["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "abort": 1, "error": 2, "length": num_admitted - 4}
    assert last["vllm:e2e_request_latency_seconds_count", "m"] == num_admitted
    assert last["vllm:admission_rejections_total", "m"] == num_refused
    assert last["vllm:corrupted_requests_total", "m"] == 1
    assert last["pagestream:failed_sequences_total", "m"] == 2
    assert last["pagestream:resumptions_total", "reader"] == 1


def test_the_tokens_are_those_of_the_usages(account: Account):
    last = account.last
    lost = 2 + 1  # requests that failed or were left, whose usage nobody was told
    told = {name: sum(usage[name] for usage in account.usages) for name in ("prompt_tokens", "completion_tokens")}
    assert 0 < last["vllm:prompt_tokens_total", "m"] - told["prompt_tokens"] <= lost * 20
    assert 0 < last["vllm:generation_tokens_total", "m"] - told["completion_tokens"] <= 300 + 2 * 3
    by_source = [last["vllm:prompt_tokens_by_source_total", source] for source in ("local_compute", "local_cache_hit")]
    assert sum(by_source) == last["vllm:prompt_tokens_total", "m"]
    assert by_source[1] == last["vllm:prompt_tokens_cached_total", "m"] > 0


def test_at_the_end_nothing_is_held_and_nobody_waits(account: Account):
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped", "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting_by_reason", "pagestream:kv_blocks_used", "pagestream:swap_blocks_used", "pagestream:stalled_seconds",
    ):  # fmt: skip
        assert account.last[name, "m"] == 0, name
    assert max(account.seen["vllm:num_requests_waiting_by_reason"]) == max(account.seen["vllm:num_requests_waiting"])


def test_every_part_of_a_step_took_time_and_both_ways_of_giving_way_were_used(account: Account):
    assert all(account.last["pagestream:step_seconds_sum", part] > 0 for part in STEP_PARTS)
    assert all(account.last["pagestream:preemptions_total", mode] > 0 for mode in ("swap", "recompute"))
    assert all(account.last["pagestream:swapped_blocks_total", way] > 0 for way in ("out", "in"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        ("vllm:time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
    ],
)
def test_an_older_name_has_the_same_numbers(account: Account, old: str, new: str):
    assert account.last[old, "m"] == account.last[new, "m"]
    assert account.seen[old]
