"""The options of `pagestream bench serve`, `latency` and `throughput`, and their tables."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagestream.engine import EngineArgs, StartError
from pagestream.server.bench.comparison import Contestant, check_names, ratio_rows, read_contestant
from pagestream.server.bench.load import Objective, Summary, run_round
from pagestream.server.bench.workloads import WORKLOADS, make_asks, read_asks
from pagestream.server.commands.client import DEFAULT_URL as SERVER_URL
from pagestream.server.commands.client import connected, first_model

DEFAULT_URL = f"{SERVER_URL}/v1"

bench = typer.Typer(help="Measure a running server, or the engine in this process.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Model = Annotated[str, typer.Option("--model", help="A name, a folder or a GGUF file.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
KvCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto (the model's), float32, bfloat16, float16, fp8 or int8.")]
Quantization = Annotated[str, typer.Option("--quantization", help="auto (a GGUF file's own blocks), none, int8 or int4.")]
CpuThreads = Annotated[int | None, typer.Option("--cpu-threads", help="Default: one per core.")]


@bench.command("serve")
def bench_serve(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]URL",
            help=f"Any OpenAI-compatible servers, with their /v1 (default: {DEFAULT_URL}); of several, the rounds alternate.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Default: the first that each server lists.")] = None,
    workload: Annotated[str, typer.Option("--workload", help=", ".join(WORKLOADS) + ".")] = "chat",
    dataset: Annotated[Path | None, typer.Option("--dataset", help="JSONL with prompt and max_tokens, in place of a workload.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option("--concurrency", min=1, help="Requests at a time; may be repeated.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, arriving at random, in place of --concurrency.")] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", min=1, help="Per round; default: twice the concurrency.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="The table has their medians.", min=1)] = 3,
    rest_s: Annotated[float, typer.Option("--rest", help="Seconds before each turn of several servers.", min=0)] = 2.0,
    ttft_objective_ms: Annotated[float | None, typer.Option("--ttft-objective", help="Milliseconds; for goodput.")] = None,
    itl_objective_ms: Annotated[float | None, typer.Option("--itl-objective", help="Milliseconds a token; for goodput.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="PAGESTREAM_API_KEY", help="The key that the servers ask for.")] = None,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help=r"Draw latency over load into this PNG; needs pagestream\[plot].")
    ] = None,
) -> None:
    """Put a server under load and print what its clients saw; of several, also the first one's figures over each other's."""
    if workload not in WORKLOADS:
        raise StartError(f"--workload must be one of {', '.join(WORKLOADS)}, not {workload!r}")
    if rate is not None and (concurrency or not 0 < rate < math.inf):
        raise StartError("--rate is above 0 and takes the place of --concurrency")
    if plot_file is not None:
        check_plotting()
    named = [read_contestant(text) for text in urls or [DEFAULT_URL]]
    check_names([name for name, _ in named])
    servers = [Contestant(name, url, model or model_at(url, api_key)) for name, url in named]
    objective = Objective(seconds(ttft_objective_ms), seconds(itl_objective_ms))
    table: list[dict[str, Any]] = []
    for at_once in [None] if rate is not None else concurrency or [1, 8, 32]:
        count = num_requests or (32 if at_once is None else max(3, 2 * at_once))
        summaries: dict[str, list[Summary]] = {server.name: [] for server in servers}
        for number in range(rounds):
            seed = 1000 * (at_once or 0) + number + 1
            asks = read_asks(dataset, count) if dataset else make_asks(workload, count, seed)
            for server in servers:  # one after another, so that a ratio holds when the machine's pace drifts
                # One's threads may wait busily for a second after its last answer, and would slow the next one down.
                time.sleep(rest_s if len(servers) > 1 else 0)
                load = run_round(
                    server.url, server.model, asks, concurrency=at_once, rate=rate, seed=seed, api_key=api_key, objective=objective
                )
                summaries[server.name].append(asyncio.run(load))
        label = f"{rate:g} req/s" if at_once is None else str(at_once)
        table += [{"load": label, "server": name, **median_of(of_server)} for name, of_server in summaries.items()]
    print_serve_table(table)
    if len(servers) > 1:
        print_table("the first over each other", ratio_rows(table))
    write_json(json_file, table)
    if plot_file is not None:
        draw(table, plot_file)
    if failed := [entry for entry in table if entry["num_failed"] == rounds * entry["num_requests"]]:
        for entry in failed:
            print(f"pagestream: error: every request failed at {entry['load']} to {entry['server']}", file=sys.stderr)
        raise typer.Exit(1)


@bench.command("latency")
def bench_latency(
    model: Model = "smollm2",
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="Sequences per step; may be repeated.")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each sequence.")] = 100,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Of each sequence; so many steps are timed, less one.")] = 64,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    quantization: Quantization = "auto",
    cpu_threads: CpuThreads = None,
    json_file: JsonFile = None,
) -> None:
    """Time decode steps of the engine in this process, beside the floor that this machine sets."""
    from pagestream.server.bench.offline import step_rows

    args = EngineArgs(
        model=model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization, cpu_threads=cpu_threads
    )
    table = step_rows(args, batch_size or [1, 8, 32], prompt_tokens, output_tokens)
    print_table("decode steps", table)
    write_json(json_file, table)


@bench.command("throughput")
def bench_throughput(
    model: Model = "smollm2",
    workload: Annotated[str, typer.Option("--workload", help=", ".join(WORKLOADS))] = "chat",
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="All given at once.")] = 64,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    quantization: Quantization = "auto",
    cpu_threads: CpuThreads = None,
    json_file: JsonFile = None,
) -> None:
    """Complete many prompts offline, as fast as they go."""
    from pagestream.server.bench.offline import throughput_row

    if workload not in WORKLOADS:
        raise StartError(f"--workload must be one of {', '.join(WORKLOADS)}, not {workload!r}")
    options = {
        "model": model, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization, "cpu_threads": cpu_threads,
    }  # fmt: skip
    table = [throughput_row(options, workload, num_prompts)]
    print_table("offline", table)
    write_json(json_file, table)


@bench.command("kernels")
def bench_the_kernels(
    json_file: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarse grid; without a GPU, one target.")] = False,
) -> None:
    """Time the GPU kernels; without a GPU, print what their compiled code tells."""
    from pagestream.engine import bench_kernels

    bench_kernels(json_file, quick=quick)


def seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def model_at(url: str, api_key: str | None) -> str:
    """Raises StartError if nobody answers there."""
    with connected(url, api_key) as client:
        return first_model(client)


def median_of(summaries: list[Summary]) -> dict[str, Any]:
    """Figure by figure; the failures of all rounds are added up."""
    parts = [summary.as_dict() for summary in summaries]

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: middle([value[name] for value in values]) for name in values[0]}
        return statistics.median(values)

    merged = {name: middle([part[name] for part in parts]) for name in parts[0] if name != "errors"}
    merged["num_failed"] = sum(part["num_failed"] for part in parts)
    merged["errors"] = [error for part in parts for error in part["errors"]][:3]
    return merged


def print_serve_table(table: list[dict[str, Any]]) -> None:
    rows = [
        {
            "at once": entry["load"],
            **({"server": entry["server"]} if len({other["server"] for other in table}) > 1 else {}),
            "out tok/s": entry["output_tokens_per_s"],
            "in tok/s": entry["prompt_tokens_per_s"],
            "TTFT p50 ms": entry["ttft_ms"]["p50"],
            "TTFT p99 ms": entry["ttft_ms"]["p99"],
            "inter-token p50 ms": entry["inter_token_ms"]["p50"],
            "inter-token p99 ms": entry["inter_token_ms"]["p99"],
            "end-to-end p50 ms": entry["end_to_end_ms"]["p50"],
            "good req/s": entry["good_requests_per_s"],
            "failed": entry["num_failed"],
        }
        for entry in table
    ]
    print_table("under load", rows)
    for error in {error for entry in table for error in entry["errors"]}:
        Console(stderr=True).print(f"failed: {error}", markup=False)


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """A column for each figure or, where that is too wide, a line; no figure is cut, however narrow the terminal."""
    console = Console()
    lines = [list(rows[0])]
    lines += [[f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    table = made_table(title, lines)
    if width_of(table) > console.width:
        table = made_table(title, [list(line) for line in zip(*lines, strict=True)])
    console.width = max(width_of(table), console.width)
    console.print(table)


def made_table(title: str, lines: list[list[str]]) -> Table:
    table = Table(title=title)
    for name in lines[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def width_of(table: Table) -> int:
    """With every name and figure whole."""
    return Console(width=10_000).measure(table).maximum


def write_json(path: Path | None, table: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def check_plotting() -> None:
    """Raises StartError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartError("--plot needs matplotlib: pip install 'pagestream[plot]'")


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Latency and throughput over load, a line or two for each server."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(entry["server"] for entry in table))
    for server in names:
        entries = [entry for entry in table if entry["server"] == server]
        loads, of = [entry["load"] for entry in entries], f" of {server}" if len(names) > 1 else ""
        for name, label in (("ttft_ms", "first token"), ("inter_token_ms", "inter-token")):
            left.plot(loads, [entry[name]["p50"] for entry in entries], marker="o", label=f"{label} p50{of}")
            left.plot(loads, [entry[name]["p99"] for entry in entries], marker="o", linestyle=":", label=f"{label} p99{of}")
        right.plot(loads, [entry["output_tokens_per_s"] for entry in entries], marker="o", label=server)
    left.set(xlabel="load", ylabel="ms", yscale="log")
    left.legend(fontsize="small")
    right.set(xlabel="load", ylabel="output tokens per second")
    if len(names) > 1:
        right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
