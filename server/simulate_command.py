"""`pagestream simulate`: a load through the scheduler without a model, for a machine that need not exist."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagestream.engine import (
    CostModel,
    EngineArgs,
    Machine,
    PoissonLoad,
    PreemptionMode,
    Report,
    SchedulerLimits,
    StartError,
    TraceRequest,
    capacity,
    read_trace,
    simulate,
    write_trace,
)
from pagestream.server.args import count

LOAD, MACHINE, COSTS, OUTPUT = "Load", "Machine", "Costs", "Output"
CAPACITY_SAMPLE = 2000  # requests of the load that show what the machine can serve


def option(flag: str, panel: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


def counted(flag: str, panel: str, text: str) -> Any:
    return option(flag, panel, text, parser=count, metavar="COUNT")


def simulate_command(
    trace: Annotated[
        Path | None, option("--trace", LOAD, "JSON lines: arrival_s, prompt_tokens, output_tokens; prefix_id, prefix_tokens.")
    ] = None,
    generate: Annotated[int | None, counted("--generate", LOAD, "So many requests that arrive at random.")] = None,
    rate: Annotated[float | None, option("--rate", LOAD, "Generated requests per second.")] = None,
    load: Annotated[float | None, option("--load", LOAD, "The rate as a share of what the machine can serve, as 0.95.")] = None,
    seed: Annotated[int, option("--seed", LOAD, "Of the generated requests.")] = 0,
    prompt_tokens: Annotated[int, counted("--prompt-tokens", LOAD, "Their mean prompt, without its prefix.")] = 256,
    output_tokens: Annotated[int, counted("--output-tokens", LOAD, "Their mean answer.")] = 64,
    num_prefixes: Annotated[int, counted("--num-prefixes", LOAD, "Different beginnings that they share.")] = 0,
    prefix_tokens: Annotated[int, counted("--prefix-tokens", LOAD, "Tokens of each beginning.")] = 0,
    write: Annotated[Path | None, option("--write-trace", LOAD, "Keep the generated requests in this file.")] = None,
    measure: Annotated[
        str | None, option("--measure", MACHINE, "Load this model and take limits, pool and costs from this machine.")
    ] = None,
    num_kv_blocks: Annotated[int | None, counted("--num-kv-blocks", MACHINE, "Blocks in the pool; default: 4096.")] = None,
    block_size: Annotated[int | None, counted("--block-size", MACHINE, "Tokens per block; default: 16.")] = None,
    num_swap_blocks: Annotated[int | None, counted("--num-swap-blocks", MACHINE, "Blocks in the swap pool; default: 0.")] = None,
    max_num_seqs: Annotated[int | None, counted("--max-num-seqs", MACHINE, "Sequences per step; default: 64.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, counted("--max-num-batched-tokens", MACHINE, "Tokens per step; default: 512.")
    ] = None,
    preemption_mode: Annotated[str, option("--preemption-mode", MACHINE, "auto, swap or recompute.")] = "auto",
    prefix_caching: Annotated[
        bool, option("--enable-prefix-caching/--no-enable-prefix-caching", MACHINE, "Reuse the blocks of common beginnings.")
    ] = True,
    step_s: Annotated[float | None, option("--step-s", COSTS, "Seconds of every step.")] = None,
    token_s: Annotated[float | None, option("--token-s", COSTS, "Seconds of each token computed.")] = None,
    context_token_s: Annotated[
        float | None, option("--context-token-s", COSTS, "Seconds of each earlier token attended to.")
    ] = None,
    block_copy_s: Annotated[float | None, option("--block-copy-s", COSTS, "Seconds of each block copied.")] = None,
    as_json: Annotated[bool, option("--json", OUTPUT, "One JSON object in place of the table.")] = False,
) -> None:
    """Serve a load without a model: which latencies, preemptions and cache hits would it see?"""
    machine = Machine(SchedulerLimits(64, 512), 4096)
    if measure is not None:
        from pagestream.engine import measure_machine  # brings torch with it, and takes seconds

        machine = measure_machine(EngineArgs(model=measure).to_config())
    machine = changed(
        machine,
        num_blocks=num_kv_blocks,
        block_size=block_size,
        num_swap_blocks=num_swap_blocks,
        enable_prefix_caching=prefix_caching,
        limits=changed(
            machine.limits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            preemption_mode=mode(preemption_mode),
        ),
        costs=changed(
            machine.costs, step_s=step_s, token_s=token_s, context_token_s=context_token_s, block_copy_s=block_copy_s
        ),
    )
    kind = PoissonLoad(1, 1.0, seed, prompt_tokens, output_tokens, num_prefixes, prefix_tokens)
    requests, limit = find_load(machine, kind, trace=trace, generate=generate, rate=rate, load=load, write=write)
    report = simulate(machine, requests)
    if as_json:
        print(json.dumps({"capacity_requests_per_s": limit, "costs": asdict(machine.costs), **report.as_dict()}, indent=2))
    else:
        print("\n".join(as_table(report, machine.costs, limit)))


def changed(whole: Any, **changes: Any) -> Any:
    """The dataclass with those values that were given."""
    return replace(whole, **{name: value for name, value in changes.items() if value is not None})


def mode(name: str) -> PreemptionMode:
    try:
        return PreemptionMode(name)
    except ValueError:
        raise StartError(f"--preemption-mode must be auto, swap or recompute, not {name!r}") from None


def find_load(
    machine: Machine,
    kind: PoissonLoad,
    *,
    trace: Path | None,
    generate: int | None,
    rate: float | None,
    load: float | None,
    write: Path | None,
) -> tuple[list[TraceRequest], float]:
    """The requests, and how many of their kind per second the machine can serve.  Raises StartError."""
    if trace is not None and (generate, rate, load, write) != (None, None, None, None):
        raise StartError("--generate, --rate, --load and --write-trace do not go with --trace")
    if trace is not None:
        requests = read_trace(trace)
        return requests, capacity(machine, requests[:CAPACITY_SAMPLE])
    if generate is None:
        raise StartError("give either --trace FILE or --generate COUNT")
    if (rate is None) == (load is None):
        raise StartError("--generate needs either --rate or --load")
    if load is not None and not 0 < load < math.inf:
        raise StartError(f"--load must be a share above 0, not {load:g}")
    limit = capacity(machine, replace(kind, num_requests=min(generate, CAPACITY_SAMPLE)).requests())
    if load is not None and not limit:
        raise StartError("none of these requests fits the pool, so --load means nothing; give --num-kv-blocks a larger number")
    requests = replace(kind, num_requests=generate, rate=rate if rate is not None else limit * (load or 0.0)).requests()
    if write is not None:
        write_trace(write, requests)
    return requests, limit


def as_table(report: Report, costs: CostModel, limit: float) -> list[str]:
    lines = [
        f"requests        {report.num_requests:,}: {report.num_finished:,} finished, {report.num_refused:,} too large for the pool",
        f"duration        {report.duration_s:,.1f} s, busy {report.busy_share:.1%}, {report.num_steps:,} steps",
        f"throughput      {report.requests_per_s:,.2f} requests/s of about {limit:,.2f}, {report.output_tokens_per_s:,.0f} tokens/s",
    ]
    for name, spread in (("first token", report.ttft_s), ("between tokens", report.inter_token_s), ("wait", report.wait_s)):
        shown = "  ".join(f"{key} {value * 1000:,.1f}" for key, value in asdict(spread).items())
        lines.append(f"{name:<16}{shown} ms")
    return [
        *lines,
        f"longest wait    {report.longest_wait_steps:,} steps; at most {report.longest_wait_share_of_bound:.1%} of its bound",
        f"preemptions     {report.num_preempted_recompute:,} recompute, {report.num_preempted_swap:,} swap",
        f"swapped blocks  {report.num_swapped_out_blocks:,} out, {report.num_swapped_in_blocks:,} in",
        f"recomputed      {report.num_recomputed_tokens:,} of {report.num_computed_tokens:,} tokens ({report.recomputed_share:.2%})",
        f"prefix cache    {report.prefix_hit_share:.1%} of the prompt tokens found",
        f"peak of blocks  {report.peak_blocks:,} of {report.num_blocks:,}",
        "costs           " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(costs).items()),
    ]
