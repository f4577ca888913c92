"""The load generator's arithmetic, and the commands from end to end on small loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagestream.engine import StartError
from pagestream.server.bench.command import bench_serve, print_serve_table
from pagestream.server.bench.comparison import ratio_rows
from pagestream.server.bench.load import Objective, Outcome, Percentiles, summarise
from pagestream.server.bench.workloads import arrivals_s, make_asks, read_asks
from tests.server.terminal import complaint, run_here

COMPARE = Path(__file__).parents[1] / "bench" / "compare.sh"


def test_prompts_are_the_same_for_the_same_seed_and_share_what_they_should():
    assert make_asks("chat", 3, 1) == make_asks("chat", 3, 1)
    assert make_asks("chat", 3, 1) != make_asks("chat", 3, 2)
    first, second = (ask.prompt.split() for ask in make_asks("shared", 2, 5))
    assert first[:1200] == second[:1200]
    assert first[1200:] != second[1200:]
    assert len(first) == 1240


def test_arrivals_come_at_the_rate_asked_for():
    times = arrivals_s(4000, rate=8.0, seed=3)
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] / 4000 == pytest.approx(1 / 8, rel=0.05)


def test_percentiles_are_values_that_were_seen():
    assert Percentiles.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Percentiles(3.0, 5.0, 5.0)
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0)


def test_goodput_counts_who_kept_the_objective():
    outcomes = [
        Outcome(first_token_s=0.1, inter_token_s=0.01, num_output_tokens=10),
        Outcome(first_token_s=0.9, inter_token_s=0.01, num_output_tokens=10),
        Outcome(first_token_s=0.1, inter_token_s=0.09, num_output_tokens=10),
        Outcome(error="503"),
    ]
    summary = summarise(outcomes, 2.0, Objective(first_token_s=0.5, inter_token_s=0.05))
    assert summary.good_requests_per_s == 0.5
    assert summary.requests_per_s == 1.5
    assert summary.output_tokens_per_s == 15
    assert summary.num_failed == 1
    assert summary.errors == ["503"]


def test_a_bad_line_of_a_dataset_is_named(tmp_path):
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n{"text": "b"}\n')
    with pytest.raises(StartError, match="line 2"):
        read_asks(path, 2)
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n')
    assert [ask.prompt for ask in read_asks(path, 3)] == ["a", "a", "a"]


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_no_figure_of_a_table_is_cut_however_narrow_the_terminal(capsys, monkeypatch, width, num_servers):
    monkeypatch.setenv("COLUMNS", str(width))
    times = {name: {"p50": 12_345.6, "p99": 23_456.7} for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms")}
    rates = {"output_tokens_per_s": 34_567.8, "prompt_tokens_per_s": 45_678.9, "good_requests_per_s": 1.5}
    rest = {"num_failed": 0, "errors": []}
    servers = ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1"][:num_servers]
    print_serve_table([{"load": load, "server": server, **times, **rates, **rest} for load in (1, 32) for server in servers])
    printed = capsys.readouterr().out
    assert "…" not in printed
    for figure in ("12,345.6", "23,456.7", "34,567.8", "45,678.9"):
        assert printed.count(figure) >= 2 * num_servers
    assert all(printed.count(server) == (2 if num_servers > 1 else 0) for server in servers)
    assert "inter-token p99 ms" in printed


def test_a_server_under_load(live, tmp_path):
    figures = tmp_path / "figures.json"
    asks = tmp_path / "asks.jsonl"
    asks.write_text('{"prompt": "one two", "max_tokens": 5}\n{"prompt": "three", "max_tokens": 5}\n')
    url = f"http://127.0.0.1:{live.port}/v1"
    load = ("--dataset", str(asks), "--concurrency", "2", "--rounds", "1", "--num-requests", "4")
    done = run_here("bench", "serve", url, *load, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(figures.read_text())
    assert entry["num_failed"] == 0
    assert entry["num_requests"] == 4
    assert entry["output_tokens_per_s"] > 0
    assert entry["ttft_ms"]["p50"] <= entry["end_to_end_ms"]["p50"]


def test_a_load_of_which_nothing_came_through_is_no_success(start, tmp_path):
    live = start({"max_num_seqs": 0, "max_num_queued": 0})
    asks = tmp_path / "asks.jsonl"
    asks.write_text('{"prompt": "one two", "max_tokens": 5}\n')
    url = f"http://127.0.0.1:{live.port}/v1"
    done = run_here("bench", "serve", url, "--dataset", str(asks), "--concurrency", "2", "--rounds", "1")
    assert done.returncode == 1
    assert "server_overloaded" in done.stderr, "why"
    assert done.stderr.endswith(f"pagestream: error: every request failed at 2 to {url}\n")


def test_peers_are_measured_in_turn_and_compared(start, tmp_path, monkeypatch):
    """By the script, with two servers of ours: each is asked the same, and the rounds alternate."""
    asks, figures, plot = tmp_path / "asks.jsonl", tmp_path / "figures.json", tmp_path / "plot.png"
    asks.write_text('{"prompt": "one two", "max_tokens": 5}\n{"prompt": "three", "max_tokens": 4}\n')
    order: list[str] = []
    servers = []
    for name in ("ours", "peer"):
        live = start()
        servers.append(f"{name}={live.url}/v1")

        def add_requests(*arguments, name=name, add=live.engine.add_requests, **options):
            order.append(name)
            return add(*arguments, **options)

        monkeypatch.setattr(live.engine, "add_requests", add_requests)
    load = ("--dataset", str(asks), "--concurrency", "1", "--rounds", "2", "--num-requests", "2", "--rest", "0")
    done = subprocess.run(
        [COMPARE, *servers, "--", *load, "--json", str(figures), "--plot", str(plot)],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PAGESTREAM": f"{sys.executable} -m pagestream.server", "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert order == ["ours", "ours", "peer", "peer"] * 2
    ours, peer = json.loads(figures.read_text())
    assert (ours["server"], peer["server"]) == ("ours", "peer")
    assert ours["num_failed"] == peer["num_failed"] == 0
    ratio = ours["output_tokens_per_s"] / peer["output_tokens_per_s"]
    assert re.search(rf"ours / peer\W+{ratio:.2f}", done.stdout), done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"pip install 'pagestream\[plot\]'"):
        bench_serve(["http://127.0.0.1:1/v1"], plot_file=Path("plot.png"))


def test_ratios_are_the_firsts_to_each_other():
    def entry(load, server, rate, ms):
        times = {name: {"p50": ms} for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms")}
        return {"load": load, "server": server, "output_tokens_per_s": rate, "prompt_tokens_per_s": 0.0, **times}

    rows = ratio_rows([entry("1", "a", 30.0, 5.0), entry("1", "b", 20.0, 10.0), entry("8", "a", 1.0, 1.0), entry("8", "b", 4.0, 1.0)])
    assert [(row["at once"], row["servers"], row["out tok/s"], row["TTFT p50"]) for row in rows] == [
        ("1", "a / b", "1.50", "0.50"),
        ("8", "a / b", "0.25", "1.00"),
    ]
    assert rows[0]["in tok/s"] == "-"


def test_decode_steps_beside_their_floor(tiny_llama, tmp_path):
    figures = tmp_path / "figures.json"
    done = run_here(
        "bench", "latency", "--model", str(tiny_llama), "--batch-size", "2", "--output-tokens", "8", "--json", str(figures)
    )
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(figures.read_text())
    assert entry["sequences"] == 2
    assert 0 < entry["floor ms"] < entry["step ms"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "http://127.0.0.1:1/v1"], "127.0.0.1:1"),
        (["serve", "--workload", "nonsense"], "--workload"),
        (["serve", "--rate", "-1"], "--rate"),
        (["serve", "a=http://127.0.0.1:1/v1", "a=http://127.0.0.1:2/v1"], "called a"),
        (["throughput", "--workload", "nonsense"], "--workload"),
    ],
)
def test_what_can_not_be_measured_says_so_in_one_line(arguments, named):
    assert named in complaint("bench", *arguments)
