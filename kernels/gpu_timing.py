"""Times of every kernel on the GPU of this machine, as shares of the floor; kernels.bench prints them.

A case is captured as a CUDA graph, with the second-level cache emptied between runs.  The floor is bytes over the read rate that
the same run measures, or FLOPs over its matrix rate.  Data is random: on zeros the matrix units run a tenth faster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from pagestream.kernels.compilation import compile_noted, launches_noted
from pagestream.kernels.kv_format import is_quantised

BATCHES = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PAGES = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)
SMALL_FLOOR_S, SMALL_SLACK_S = 20e-6, 5e-6  # below such a floor, this much more is what a launch, a tail and a merge may cost
CACHE_FLUSH_BYTES = 256 << 20
FIRST_WITH_FP8 = 89  # compute capability
# What else might be right for a GPU that nobody has measured: written down beside the chosen config, for the next tuning.
VARIANTS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "168 registers, 3 programs": {"max_registers": 168, "programs_per_sm": 3},
    "tile 32, 168 registers, 3 programs": {"tile": 32, "max_registers": 168, "programs_per_sm": 3},
    "2 stages": {"num_stages": 2},
    "leaf 256": {"leaf": 256},
    "leaf 1024": {"leaf": 1024},
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One row of the report to come.  Cases are made one at a time, so that only one holds memory."""

    facts: dict[str, Any]  # what it is, for whoever judges the row
    make: Callable[[], Case]
    is_first: bool = True  # of those that launch the same kernels: these are compiled before any is timed

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in self.facts.values())


def seconds_of(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of one run on the GPU: captured once, replayed, the cache flushed in between."""
    # Read, not written: a cache full of what must yet go to memory would have the run wait for that.
    flush = torch.zeros(CACHE_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        flush.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measured_rates() -> dict[str, float]:
    """Bytes a second of reading and of a copy, FLOPs a second of a bfloat16 product: what the floors are made of."""
    data = torch.randn(1 << 29, dtype=torch.float32, device="cuda")  # 2 GiB, far beyond every cache
    target = torch.empty_like(data)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copied = data.numel() * 8 / seconds_of(lambda: target.copy_(data))
    return {
        # A sum that is slower than a copy would make a floor that flatters.
        "read": max(data.numel() * 4 / seconds_of(data.sum), copied),
        "copy": copied,
        "matrix": 2 * 8192**3 / seconds_of(lambda: square @ square),
    }


class Cases:
    """The grid on this GPU, in parts that can be run apart: whatever goes wrong in one takes no figure from the others."""

    def __init__(self, *, device: str, arch: int | str, num_sms: int, most_tokens: float, is_quick: bool = False):
        """most_tokens: a cell of the grid with more of them, over all sequences, is left out."""
        self.device, self.arch, self.num_sms, self.most_tokens = device, arch, num_sms, most_tokens
        self.pages = [
            dtype for dtype in PAGES if dtype != torch.float8_e4m3fn or isinstance(arch, str) or arch >= FIRST_WITH_FP8
        ]
        self.batches: tuple[int, ...] = BATCHES[::4] if is_quick else BATCHES
        self.contexts: tuple[int, ...] = CONTEXTS[::3] if is_quick else CONTEXTS

    @classmethod
    def here(cls, *, is_quick: bool) -> Cases:
        properties = torch.cuda.get_device_properties(0)
        arch = properties.gcnArchName.split(":")[0] if torch.version.hip else properties.major * 10 + properties.minor
        most_tokens = 0.15 * torch.cuda.mem_get_info()[0] / 4096
        return cls(
            device="cuda", arch=arch, num_sms=properties.multi_processor_count, most_tokens=most_tokens, is_quick=is_quick
        )  # fmt: skip

    def of_part(self, part: str) -> Iterator[Timing]:
        return {"decode": self.decode, "prefill": self.prefill, "other": self.other, "variants": self.variants}[part]()

    def attention(
        self, pages: torch.dtype, query_lens: list[int], seq_lens: list[int], *,
        is_first: bool, changes: dict[str, Any] | None = None, **facts: Any,
    ) -> Timing:  # fmt: skip
        shape = AttentionShape(cache_dtype=pages)
        config = choose_config(shape.size, shape.heads // shape.kv_heads, arch=self.arch, quantised=is_quantised(pages))

        def make() -> Case:
            # One longest length for all, as in an engine: it is part of what is compiled.
            return attention_case(
                shape, query_lens, seq_lens, device=self.device, arch=self.arch, num_sms=self.num_sms, max_seq_len=CONTEXTS[-1],
                config=dataclasses.replace(config, **changes or {}),
            )  # fmt: skip

        return Timing({"kind": facts.pop("kind"), "pages": str(pages).removeprefix("torch.")} | facts, make, is_first)

    def decode(self) -> Iterator[Timing]:
        for pages in self.pages:
            for batch in self.batches:
                for context in self.contexts:
                    if batch * context <= self.most_tokens:
                        yield self.attention(
                            pages, [1] * batch, [context] * batch, is_first=context == self.contexts[0],
                            kind="decode", batch=batch, context=context,
                        )  # fmt: skip
            yield self.attention(
                pages, [1] * 64, [131072] + [1024] * 63, is_first=False, kind="ragged decode", lengths="1 x 131072 and 63 x 1024"
            )

    def prefill(self) -> Iterator[Timing]:
        for query_len in (2, 4, 8):
            yield self.attention(
                torch.bfloat16, [query_len] * 16, [8192] * 16, is_first=query_len == 2,
                kind="verify", queries=query_len, batch=16, context=8192,
            )  # fmt: skip
        for pages in self.pages:
            for query_len, context in ((512, 512), (2048, 2048), (4096, 4096), (16384, 16384), (512, 32768), (2048, 32768)):
                yield self.attention(
                    pages, [query_len], [context], is_first=context == 512, kind="prefill", queries=query_len, context=context
                )

    def variants(self) -> Iterator[Timing]:
        for pages in self.pages[:2]:
            for batch, context in ((4, 2048), (64, 4096), (4, 32768)):
                for name, changes in VARIANTS.items():
                    yield self.attention(
                        pages, [1] * batch, [context] * batch, is_first=context == 2048, changes=changes,
                        kind="variant", batch=batch, context=context, config=name,
                    )  # fmt: skip

    def other(self) -> Iterator[Timing]:
        device = self.device
        for num_tokens in (1, 64, 256, 4096):
            for number, kind in enumerate(("add and norm", "gate", "rotary and KV write")):
                yield Timing({"kind": kind, "tokens": num_tokens}, partial(one_of, elementwise_cases, number, num_tokens, device))
        yield Timing({"kind": "copy", "blocks": 16}, partial(copy_case, 16, device))
        for num_rows in (1, 64, 256):
            yield Timing({"kind": "sampling", "rows": num_rows}, partial(sampling_case, num_rows, device))
            yield Timing(
                {"kind": "sampling top-k, top-p", "rows": num_rows}, partial(sampling_case, num_rows, device, top_k=50, top_p=0.9)
            )
            yield Timing({"kind": "sampling with penalties", "rows": num_rows}, partial(sampling_case, num_rows, device, num_said=1000))
        for bits in (4, 8):
            yield Timing({"kind": f"int{bits} weight unpacked"}, partial(unpack_case, device, bits=bits))
        for bits, group in ((4, 32), (4, 128), (8, 128)):
            for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
                for num_rows in (1, 16):
                    facts = {"kind": f"int{bits} linear", "group": group, "rows": num_rows, "outputs": outputs, "inputs": inputs}
                    sizes: dict[str, Any] = {"bits": bits, "group": group, "num_outputs": outputs, "num_inputs": inputs}
                    yield Timing(facts, partial(quant_matmul_case, num_rows, device, **sizes), is_first=num_rows == 1)


def one_of(make_all: Callable[..., list[Case]], number: int, *sizes: Any) -> Case:
    return make_all(*sizes)[number]


PARTS = ("decode", "prefill", "other", "variants")


def gpu_report(parts: tuple[str, ...], *, is_quick: bool, json_path: Path | None) -> None:
    """Print a row for each case as it comes, and write all so far: a run that is cut short leaves what it had."""
    rates = measured_rates()
    print(", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in rates.items()), flush=True)
    rows: list[dict[str, Any]] = [{"name": "rates", "kind": "rates", **rates}]
    for part in parts:
        cases = Cases.here(is_quick=is_quick)
        num_kinds = compile_first(cases, part)
        print(f"{part}: {num_kinds} kernels compiled", flush=True)
        for timing in cases.of_part(part):
            rows.append(timed(timing, rates))
            if json_path is not None:
                json_path.write_text(json.dumps(rows, indent=1) + "\n")


def compile_first(cases: Cases, part: str) -> int:
    """Compile in threads what the part launches."""
    with launches_noted() as launches:
        for timing in cases.of_part(part):
            if timing.is_first:
                timing.make().run()
    return compile_noted(launches, os.cpu_count() or 1, lambda: None)


def timed(timing: Timing, rates: dict[str, float]) -> dict[str, Any]:
    """The row of one case, printed; one that fails has `error` instead of figures."""
    row: dict[str, Any] = {"name": timing.name} | timing.facts
    try:
        case = timing.make()
        seconds = seconds_of(case.run)
    except Exception as error:
        print(f"{timing.name:64} {type(error).__name__}: {error}", flush=True)
        return row | {"error": f"{type(error).__name__}: {error}"}
    floor = max(case.num_bytes / rates["read"], case.num_flops / rates["matrix"])
    share = floor / seconds
    remark = " (within the slack of a launch)" if floor < SMALL_FLOOR_S and seconds - floor <= SMALL_SLACK_S else ""
    print(f"{timing.name:64}{seconds * 1e6:10.1f} us{floor * 1e6:10.1f} us{share:8.1%}{remark}", flush=True)
    return row | {
        "bytes": case.num_bytes, "flops": case.num_flops, "seconds": seconds, "floor_seconds": floor, "share_of_floor": share,
        "over_floor_seconds": seconds - floor,
    }  # fmt: skip
