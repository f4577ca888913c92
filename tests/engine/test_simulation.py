"""The scheduler without a model: the same report to the byte, and loads near the limit end well."""

import json
import subprocess
import sys

import pytest

from pagestream.engine import (
    CostModel,
    Machine,
    PoissonLoad,
    PreemptionMode,
    SchedulerLimits,
    StartError,
    TraceRequest,
    capacity,
    read_trace,
    simulate,
    write_trace,
)

PROGRAM = """
import json
from pagestream.engine import Machine, PoissonLoad, SchedulerLimits, simulate
load = PoissonLoad(300, 8.0, seed=5, num_prefixes=3, prefix_tokens=64)
machine = Machine(SchedulerLimits(32, 256), num_blocks=300, num_swap_blocks=50)
print(json.dumps(simulate(machine, load.requests()).as_dict()))
"""


def test_the_same_bytes_at_every_run():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(runs[0])["num_finished"] == 300
    assert runs[0] == runs[1]


def at_capacity(num_requests: int, machine: Machine, share: float) -> list[TraceRequest]:
    limit = capacity(machine, PoissonLoad(min(num_requests, 2000), 1.0, prompt_tokens=200, output_tokens=100).requests())
    return PoissonLoad(num_requests, share * limit, seed=3, prompt_tokens=200, output_tokens=100).requests()


def check_bounds(machine: Machine, num_requests: int) -> None:
    report = simulate(machine, at_capacity(num_requests, machine, 0.95))
    assert report.num_finished == num_requests
    assert 0 < report.longest_wait_share_of_bound <= 1
    assert report.recomputed_share < 0.05
    assert report.num_preempted_recompute + report.num_preempted_swap > 0, "nobody had to give way: the test shows nothing"
    assert report.peak_blocks <= machine.num_blocks
    assert report.busy_share > 0.9


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_load_at_95_percent_of_capacity_is_served_within_the_bounds(mode):
    check_bounds(Machine(SchedulerLimits(32, 256, preemption_mode=mode), num_blocks=250, num_swap_blocks=100), 1500)


@pytest.mark.slow
def test_a_day_at_95_percent_of_capacity():
    # About 100,000 requests, a little more than one per second.
    check_bounds(Machine(SchedulerLimits(32, 256), num_blocks=250, costs=CostModel(step_s=0.018, token_s=0.0025)), 100_000)


def test_every_token_is_accounted_for():
    requests = [TraceRequest(0.0, 30, 5), TraceRequest(0.0, 17, 1), TraceRequest(3.0, 40, 8)]
    report = simulate(Machine(SchedulerLimits(4, 64), num_blocks=20), requests)
    # The last token of an answer is never computed.
    assert report.num_computed_tokens == (30 + 4) + 17 + (40 + 7)
    assert report.num_finished == 3
    assert report.peak_blocks == 2 + 2  # when the first two have their prompts


def test_times_are_those_of_the_cost_model():
    costs = CostModel(step_s=1.0, token_s=0.1, context_token_s=0.01)
    report = simulate(Machine(SchedulerLimits(4, 64), num_blocks=20, costs=costs), [TraceRequest(2.0, 20, 3)])
    first, second, third = 1 + 20 * 0.1, 1 + 0.1 + 20 * 0.01, 1 + 0.1 + 21 * 0.01
    assert report.ttft_s.max == pytest.approx(first)
    assert report.inter_token_s.max == pytest.approx(third)
    assert report.duration_s == pytest.approx(first + second + third)


def test_a_prefix_is_shared_by_those_of_its_name_only():
    def hits(names: list[str]) -> float:
        requests = [TraceRequest(10.0 * at, 64, 2, name, 48) for at, name in enumerate(names)]
        return simulate(Machine(SchedulerLimits(4, 64), num_blocks=40), requests).prefix_hit_share

    assert hits(["same-name-1", "same-name-2"]) == 0
    assert hits(["same-name-1", "same-name-1"]) == 48 / 128


def test_what_can_never_fit_is_refused_and_harms_nobody():
    report = simulate(Machine(SchedulerLimits(4, 64), num_blocks=4), [TraceRequest(0.0, 60, 6), TraceRequest(0.0, 60, 5)])
    assert (report.num_refused, report.num_finished) == (1, 1)


def test_a_trace_survives_its_file(tmp_path):
    requests = PoissonLoad(50, 3.0, num_prefixes=2, prefix_tokens=16).requests()
    write_trace(tmp_path / "trace.jsonl", requests)
    assert read_trace(tmp_path / "trace.jsonl") == requests
    assert PoissonLoad(50, 3.0, seed=1, num_prefixes=2, prefix_tokens=16).requests() != requests


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": true}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "prefix_tokens": 5, "prefix_id": 1}', "prefix_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "prefix_tokens": 3}', "prefix_id"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "prompt": "x"}', "prompt"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, word):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}\n' + line, encoding="utf-8")
    with pytest.raises(StartError, match=rf"line 2.*{word}"):
        read_trace(path)
