"""What the kernels reach, and what can be said of them where there is no GPU.

On a GPU: times every kernel over a grid of sizes, and states it as a share of the floor (kernels.gpu_timing).
Without one: compiles the same launches for four GPUs, in as many threads as there are cores, and prints registers, spills, shared
memory, the innermost loop, and the bounds of kernels.static_analysis: in under a minute on two cores, with nothing cached.

python -m pagestream.kernels.bench [--json FILE] [--quick] [--part NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import time
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
    unpack_case,
)
from pagestream.kernels.compilation import launches_noted
from pagestream.kernels.gpu_timing import PARTS, gpu_report
from pagestream.kernels.kv_format import is_quantised
from pagestream.kernels.quant_matmul import COLS, PIECE_BYTES
from pagestream.kernels.static_analysis import TARGETS, StaticFigures, compiled, figures_of


def static_cases(arch: int | str) -> Iterator[tuple[str, Callable[[], Case], dict[str, float]]]:
    """(what, how to make it, bytes that the loop of a kernel takes in), each kernel once and small, on the CPU.

    Sizes of tensors are not part of what is compiled.
    """
    for cache_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        shape = AttentionShape(cache_dtype=cache_dtype)
        config = choose_config(shape.size, shape.heads // shape.kv_heads, arch=arch, quantised=is_quantised(cache_dtype))
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
    for bits, group in ((4, 32), (4, 128), (8, 32), (8, 128)):
        loop_bytes = {"_quant_matmul_kernel": COLS * max(PIECE_BYTES, group * bits / 8)}
        yield f"int{bits} linear, group {group}", partial(quant_matmul_case, 1, "cpu", bits=bits, group=group), loop_bytes
    for bits in (4, 8):
        yield f"int{bits} weight unpacked", partial(unpack_case, "cpu", bits=bits, num_outputs=64, num_inputs=256), {}


def same(case: Case) -> Case:
    return case


def static_report(targets: Sequence[str] = ("sm_80", "sm_90", "sm_100", "gfx942")) -> list[dict[str, Any]]:
    """One row per kernel, case and target, printed as soon as a target is through."""
    rows: list[dict[str, Any]] = []
    header = f"{'target':8}{'kernel':28}{'case':46}{'regs':>5}{'spill':>6}{'smem':>7}{'warps':>6}{'loop':>6}{'unit':>8}{'/SM':>4}"
    print(f"{header}{'in flight':>10}{'bound TB/s':>11}")
    for target in targets:
        start = time.perf_counter()
        labels: list[tuple[str, dict[str, float]]] = []
        with launches_noted() as launches:
            for label, make, loop_bytes in static_cases(TARGETS[target].arch):
                make().run()
                labels += [(label, loop_bytes)] * (len(launches) - len(labels))
        kernels = compiled(launches, TARGETS[target])
        compile_s = time.perf_counter() - start
        for (label, loop_bytes), figures in zip(labels, figures_of(kernels), strict=True):
            rows.append(static_row(target, label, figures, loop_bytes.get(figures.name, 0.0)))
        print(f"{target}: compiled in {compile_s:.1f} s, less where Triton's cache had them")
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pagestream bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="a coarse grid (on a GPU), one target (without)")
    parser.add_argument("--part", choices=PARTS, action="append", help="of what is timed on a GPU; may be given several times")
    args = parser.parse_args(argv)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as the engine does
    if torch.cuda.is_available():
        gpu_report(tuple(args.part or PARTS), is_quick=args.quick, json_path=args.json)
        return
    rows = static_report(("sm_90",) if args.quick else ("sm_80", "sm_90", "sm_100", "gfx942"))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
