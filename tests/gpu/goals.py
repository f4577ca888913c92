"""What the figures of a check say of the goals: reached, missed, or not measured.

python tests/gpu/goals.py FOLDER        reads kernels-*.json and check.json there; exits with 1 unless every goal is reached
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LARGE_BYTES = 64 << 20  # of a layer's keys and values in bfloat16: from there on the memory's rate decides
BYTES_PER_TOKEN = 4096  # of such a layer
MATRIX_RATE = 790e12  # bfloat16 FLOPs a second of the H200, as measured on random data
LONG_PROMPT = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: str
    reached: str  # the figure, and of which case
    is_met: bool | None  # None: not measured


def worst(goal: str, figures: Iterable[tuple[float, str]], limit: float, unit: str = "", *, is_floor: bool) -> Verdict:
    """Of many figures the one that is nearest to missing the limit, or furthest beyond it."""
    found = sorted(figures)
    if not found:
        return Verdict(goal, "not measured", None)
    value, case = found[0] if is_floor else found[-1]
    return Verdict(goal, f"{value:.3g}{unit} ({case})", value >= limit if is_floor else value <= limit)


def decode_cells(rows: Sequence[Row], pages: str) -> dict[tuple[int, int], Row]:
    """By batch and context."""
    return {(row["batch"], row["context"]): row for row in rows if measured(row, "decode") and row["pages"] == pages}


def is_large(cell: tuple[int, int]) -> bool:
    return cell[0] * cell[1] * BYTES_PER_TOKEN >= LARGE_BYTES


def cliffs(cells: dict[tuple[int, int], Row]) -> Iterable[tuple[float, str]]:
    """How far the share of each large cell lies below that of a neighbour on the grid, or of a cell of as many bytes."""
    large = {cell: row["share_of_floor"] for cell, row in cells.items() if is_large(cell)}
    batches, contexts = (sorted({cell[axis] for cell in large}) for axis in (0, 1))
    for cell, share in large.items():
        for other, other_share in large.items():
            steps = abs(batches.index(cell[0]) - batches.index(other[0]))
            steps += abs(contexts.index(cell[1]) - contexts.index(other[1]))
            has_as_many_bytes = cell[0] * cell[1] == other[0] * other[1]
            if steps == 1 or has_as_many_bytes:
                yield other_share / share, f"{cell[0]} x {cell[1]} beside {other[0]} x {other[1]}"


def judge_decode(rows: Sequence[Row]) -> Iterable[Verdict]:
    plain = decode_cells(rows, "bfloat16")
    named = {cell: f"{cell[0]} x {cell[1]}" for cell in plain}
    yield worst(
        "decode: >= 85 % of the read rate from 64 MB a layer",
        ((100 * row["share_of_floor"], named[cell]) for cell, row in plain.items() if is_large(cell)), 85, " %", is_floor=True,
    )  # fmt: skip
    yield worst(
        "decode: at most 5 us over the floor below",
        ((1e6 * row["over_floor_seconds"], named[cell]) for cell, row in plain.items() if not is_large(cell)),
        5, " us", is_floor=False,
    )  # fmt: skip
    yield worst("decode: no cell > 1.25 times off its neighbours", cliffs(plain), 1.25, is_floor=False)
    for pages in ("float8_e4m3fn", "int8"):
        ratios = {
            cell: plain[cell]["seconds"] / row["seconds"] for cell, row in decode_cells(rows, pages).items() if cell in plain
        }
        large = ((ratio, named[cell]) for cell, ratio in ratios.items() if is_large(cell))
        yield worst(f"decode: {pages} >= 1.7 times as fast as bfloat16 from 64 MB", large, 1.7, is_floor=True)
        yield worst(f"decode: {pages} never slower", ((ratio, named[cell]) for cell, ratio in ratios.items()), 1.0, is_floor=True)
    same = plain.get((16, 8192))
    verify = [(row["seconds"] / same["seconds"], f"{row['queries']} tokens") for row in rows if same and measured(row, "verify")]
    yield worst("verification of 2 to 8 tokens: <= 1.3 times one token's time", verify, 1.3, is_floor=False)
    flat = plain.get((2, 131072))
    ragged = [
        (flat["share_of_floor"] / row["share_of_floor"], row["name"])
        for row in rows
        if flat and measured(row, "ragged decode") and row["pages"] == "bfloat16"
    ]
    yield worst("decode: one long sequence among short ones within 1.15 of 2 x 131072", ragged, 1.15, is_floor=False)


def measured(row: Row, kind: str) -> bool:
    return row["kind"] == kind and "seconds" in row


def judge_prefill(rows: Sequence[Row]) -> Iterable[Verdict]:
    rates = {
        (row["queries"], row["context"]): 100 * row["flops"] / row["seconds"] / MATRIX_RATE
        for row in rows
        if measured(row, "prefill") and row["pages"] == "bfloat16"
    }
    whole = [(rate, str(queries)) for (queries, context), rate in rates.items() if queries == context >= LONG_PROMPT]
    yield worst("prefill: >= 60 % of 790 TFLOP/s from 4k", whole, 60, " %", is_floor=True)
    base = rates.get((LONG_PROMPT, LONG_PROMPT))
    chunks = [(rates[cell] / base, f"{cell[0]} of {cell[1]}") for cell in rates if base and cell[0] < cell[1]]
    yield worst("prefill after a cached prefix: >= 90 % of that rate", chunks, 0.9, is_floor=True)


def judge_engine(figures: Row) -> Iterable[Verdict]:
    rows: dict[tuple[int, int], Row] = {(row["batch_size"], row["num_prompt_tokens"]): row for row in figures.get("generate", [])}
    alone = [(row["decode_tokens_per_s"], "1k") for cell, row in rows.items() if cell == (1, 1024)]
    yield worst("8B decode, batch 1: >= 227 tok/s", alone, 227, " tok/s", is_floor=True)
    crowd = [(100 * row["share_of_floor"], "2k") for cell, row in rows.items() if cell == (64, 2048)]
    yield worst("8B decode, batch 64 at 2k: >= 75 % of the floor", crowd, 75, " %", is_floor=True)
    for batch in (16, 64, 256):
        row = rows.get((batch, 1024))
        text = f"{row['decode_tokens_per_s']:.0f} tok/s, {row['share_of_floor']:.1%} of the floor" if row else "not measured"
        yield Verdict(f"8B decode, batch {batch} at 1k: measured", text, True if row else None)
    late = figures.get("compiled_after_start")
    counted = ("not measured", None) if late is None else (str(late), late == 0)
    yield Verdict("no kernel compiled after the start", *counted)


def judge(rows: Sequence[Row], figures: Row) -> list[Verdict]:
    return [*judge_decode(rows), *judge_prefill(rows), *judge_engine(figures)]


def main(folder: Path) -> int:
    rows = [row for path in sorted(folder.glob("kernels-*.json")) for row in json.loads(path.read_text())]
    path = folder / "check.json"
    figures = json.loads(path.read_text()) if path.is_file() else {}
    verdicts = judge(rows, figures)
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"FAILED   {row['name']}: {row['error']}")
    for verdict in verdicts:
        word = {True: "reached", False: "MISSED", None: "MISSING"}[verdict.is_met]
        print(f"{word:9}{verdict.goal:72}{verdict.reached}")
    return 0 if all(verdict.is_met for verdict in verdicts) and not failed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
