"""What the kernels reach, and what can be said of them where there is no GPU.

On a GPU: times every kernel over a grid of sizes, captured as a CUDA graph, with the second-level cache emptied between runs, and
states it as a share of the floor: bytes over the read rate that the same run measures, or FLOPs over its matrix rate.
Without one: compiles the same launches for four GPUs and prints registers, spills, shared memory, the innermost loop, and the
bounds of kernels.static_analysis, in under a minute.

python -m pagestream.kernels.bench [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagestream.kernels.attention_plan import choose_config
from pagestream.kernels.bench_cases import (
    AttentionShape,
    Case,
    attention_case,
    copy_case,
    elementwise_cases,
    quant_matmul_case,
    sampling_case,
)
from pagestream.kernels.quant_matmul import COLS, PIECE_BYTES
from pagestream.kernels.static_analysis import TARGETS, StaticFigures, figures_of, launches_compiled

BATCHES = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SMALL_FLOOR_S, SMALL_SLACK_S = 20e-6, 5e-6  # below such a floor, this much more is what a launch, a tail and a merge may cost
CACHE_FLUSH_BYTES = 256 << 20


def static_cases(arch: int | str) -> Iterator[tuple[str, Callable[[], Case], dict[str, float]]]:
    """(what, how to make it, bytes that the loop of a kernel takes in), each kernel once and small, on the CPU.

    Sizes of tensors are not part of what is compiled.
    """
    for shape in (AttentionShape(), AttentionShape(cache_dtype=torch.int8)):
        config = choose_config(shape.size, shape.heads // shape.kv_heads, arch=arch, quantised=shape.cache_dtype == torch.int8)
        key_bytes = 2.0 * shape.size * shape.cache_dtype.itemsize
        yield (
            shape.name,
            partial(attention_case, shape, [1, 40], [40, 40], device="cpu", arch=arch, num_sms=1),
            {"_paged_attention_kernel": config.tile * key_bytes, "_paged_prefill_kernel": config.long_tile * key_bytes},
        )
    for case in elementwise_cases(2, "cpu"):
        yield case.name.split(",")[0], partial(same, case), {}
    yield "copy", partial(copy_case, 1, "cpu", num_layers=1), {}
    yield "sampling", partial(sampling_case, 1, "cpu"), {}
    for bits, group in ((4, 32), (4, 128), (8, 128)):
        loop_bytes = {"_quant_matmul_kernel": COLS * max(PIECE_BYTES, group * bits / 8)}
        yield f"int{bits} linear, group {group}", partial(quant_matmul_case, 1, "cpu", bits=bits, group=group), loop_bytes


def same(case: Case) -> Case:
    return case


def static_report(targets: Sequence[str] = ("sm_80", "sm_90", "sm_100", "gfx942")) -> list[dict[str, Any]]:
    """One row per kernel, case and target, printed as it comes."""
    rows: list[dict[str, Any]] = []
    header = f"{'target':8}{'kernel':28}{'case':46}{'regs':>5}{'spill':>6}{'smem':>7}{'warps':>6}{'loop':>6}{'unit':>8}{'/SM':>4}"
    print(f"{header}{'in flight':>10}{'bound TB/s':>11}")
    for target in targets:
        for label, make, loop_bytes in static_cases(TARGETS[target].arch):
            with launches_compiled(TARGETS[target]) as launches:
                make().run()
            for launch in launches:
                rows.append(static_row(target, label, figures_of(launch), loop_bytes.get(launch.name, 0.0)))
    return rows


def static_row(target: str, label: str, figures: StaticFigures, loop_bytes: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": target, "kernel": figures.name, "case": label, "registers": figures.registers, "spill_bytes": figures.spill_bytes,
        "shared_bytes": figures.shared_bytes, "num_warps": figures.num_warps, "loop_instructions": figures.loop_instructions,
        "matrix_unit": figures.matrix_unit, "programs_per_sm": figures.programs_per_sm,
        "bytes_in_flight_per_sm": figures.programs_per_sm * loop_bytes,
        "issue_bound": figures.issue_bound(loop_bytes) if figures.loop_instructions else 0.0,
    }  # fmt: skip
    print(
        f"{target:8}{figures.name:28}{label:46}{figures.registers:5}{figures.spill_bytes:6}{figures.shared_bytes:7}"
        f"{figures.num_warps:6}{figures.loop_instructions:6}{figures.matrix_unit:>8}{figures.programs_per_sm:4}"
        f"{row['bytes_in_flight_per_sm']:10.0f}{row['issue_bound'] / 1e12:11.1f}",
        flush=True,
    )
    return row


def seconds_of(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of one run on the GPU: captured once, replayed, the cache flushed in between."""
    flush = torch.empty(CACHE_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measured_rates() -> dict[str, float]:
    """Bytes a second of a read-only sum and of a copy, FLOPs a second of a bfloat16 product: what the floors are made of."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")  # 2 GiB, far beyond every cache
    target = torch.empty_like(data)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return {
        "read": data.numel() * 4 / seconds_of(data.sum),
        "copy": data.numel() * 8 / seconds_of(lambda: target.copy_(data)),
        "matrix": 2 * 8192**3 / seconds_of(lambda: square @ square),
    }


def gpu_cases(quick: bool) -> Iterator[Case]:
    """The grid, one case at a time, so that only one holds memory."""
    properties = torch.cuda.get_device_properties(0)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else properties.major * 10 + properties.minor
    place: dict[str, Any] = {"device": "cuda", "arch": arch, "num_sms": properties.multi_processor_count}
    limit_bytes = 0.6 * torch.cuda.mem_get_info()[0]
    batches, contexts = (BATCHES[::4], CONTEXTS[::3]) if quick else (BATCHES, CONTEXTS)
    for dtype in (torch.bfloat16, torch.int8):
        shape = AttentionShape(cache_dtype=dtype)
        for batch in batches:
            for context in contexts:
                if batch * context * 4096 < limit_bytes / 4:
                    case = attention_case(shape, [1] * batch, [context] * batch, **place)
                    yield Case(f"decode {dtype}, {batch} x {context}", case.run, case.num_bytes, case.num_flops)
        case = attention_case(shape, [1] * 64, [131072] + [1024] * 63, **place)
        yield Case(f"decode {dtype}, 1 x 131072 and 63 x 1024", case.run, case.num_bytes, case.num_flops)
    for query_len in (2, 4, 8):
        case = attention_case(AttentionShape(), [query_len] * 16, [8192] * 16, **place)
        yield Case(f"verify {query_len}, 16 x 8192", case.run, case.num_bytes, case.num_flops)
    for query_len, context in ((512, 512), (2048, 2048), (4096, 4096), (16384, 16384), (512, 32768), (2048, 32768)):
        case = attention_case(AttentionShape(), [query_len], [context], **place)
        yield Case(f"prefill {query_len} of {context}", case.run, case.num_bytes, case.num_flops)
    for num_tokens in (1, 64, 256, 4096):
        yield from elementwise_cases(num_tokens, "cuda")
    yield copy_case(16, "cuda")
    for num_rows in (1, 64, 256):
        yield sampling_case(num_rows, "cuda")
        yield sampling_case(num_rows, "cuda", top_k=50, top_p=0.9)
    for bits, group in ((4, 32), (4, 128), (8, 128)):
        for num_outputs, num_inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            yield quant_matmul_case(1, "cuda", bits=bits, group=group, num_outputs=num_outputs, num_inputs=num_inputs)
            yield quant_matmul_case(16, "cuda", bits=bits, group=group, num_outputs=num_outputs, num_inputs=num_inputs)


def gpu_report(quick: bool) -> list[dict[str, Any]]:
    rates = measured_rates()
    print(", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in rates.items()))
    rows: list[dict[str, Any]] = [{"name": "rates", **rates}]
    for case in gpu_cases(quick):
        seconds = seconds_of(case.run)
        floor = max(case.num_bytes / rates["read"], case.num_flops / rates["matrix"])
        share = floor / seconds
        row = {"name": case.name, "seconds": seconds, "floor_seconds": floor, "share_of_floor": share}
        row["over_floor_seconds"] = seconds - floor
        rows.append(row)
        remark = " (within the slack of a launch)" if floor < SMALL_FLOOR_S and seconds - floor <= SMALL_SLACK_S else ""
        print(f"{case.name:56}{seconds * 1e6:10.1f} us{floor * 1e6:10.1f} us{share:8.1%}{remark}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pagestream bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="a coarse grid (on a GPU), one target (without)")
    args = parser.parse_args(argv)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as the engine does
    if torch.cuda.is_available():
        rows = gpu_report(args.quick)
    else:
        rows = static_report(("sm_90",) if args.quick else ("sm_80", "sm_90", "sm_100", "gfx942"))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
