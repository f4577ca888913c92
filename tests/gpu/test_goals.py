"""What is made of a check's figures: every goal judged, and none of them by figures that are not there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.goals import Verdict, judge, main

Row = dict[str, Any]


def good_rows() -> list[Row]:
    rows: list[Row] = [{"kind": "rates", "name": "rates", "read": 4e12}]
    for pages, factor in (("bfloat16", 1.0), ("float8_e4m3fn", 0.55), ("int8", 0.55)):
        for batch in (1, 2, 4, 16, 64):
            for context in (1024, 8192, 131072):
                floor = batch * context * 4096 * factor / 4e12
                rows.append({
                    "kind": "decode", "name": f"{pages} {batch} x {context}", "pages": pages, "batch": batch, "context": context,
                    "seconds": floor / 0.9 + 1e-6 * factor, "share_of_floor": floor / (floor / 0.9 + 1e-6 * factor),
                    "over_floor_seconds": floor / 9 + 1e-6 * factor,
                })  # fmt: skip
    same = next(row for row in rows if row["name"] == "bfloat16 16 x 8192")
    rows.append({"kind": "verify", "name": "verify", "pages": "bfloat16", "queries": 8, "seconds": 1.2 * same["seconds"]})
    rows.append({"kind": "ragged decode", "name": "ragged", "pages": "bfloat16", "seconds": 1.0, "share_of_floor": 0.85})
    for queries, context in ((512, 512), (4096, 4096), (16384, 16384), (512, 32768)):
        rows.append({
            "kind": "prefill", "name": "prefill", "pages": "bfloat16", "queries": queries, "context": context,
            "flops": 500e12 if context > 512 else 100e12, "seconds": 1.0,
        })  # fmt: skip
    return rows


def good_figures() -> Row:
    loads = ((1, 1024), (16, 1024), (64, 1024), (64, 2048), (256, 1024))
    rows = [
        {"batch_size": batch, "num_prompt_tokens": length, "decode_tokens_per_s": 230.0 * batch, "share_of_floor": 0.8}
        for batch, length in loads
    ]
    return {"generate": rows, "compiled_after_start": 0}


def by_goal(verdicts: list[Verdict], word: str) -> Verdict:
    (found,) = [verdict for verdict in verdicts if word in verdict.goal]
    return found


def test_all_goals_are_reached_by_good_figures():
    assert [verdict for verdict in judge(good_rows(), good_figures()) if verdict.is_met is not True] == []


def test_nothing_is_reached_by_no_figures():
    assert {verdict.is_met for verdict in judge([], {})} == {None}


@pytest.mark.parametrize(
    ("name", "change", "goal"),
    [
        ("bfloat16 4 x 131072", {"share_of_floor": 0.84}, ">= 85 %"),
        ("bfloat16 1 x 1024", {"over_floor_seconds": 6e-6}, "at most 5 us"),
        ("bfloat16 16 x 8192", {"share_of_floor": 0.7}, "1.25 times off"),
        ("float8_e4m3fn 64 x 8192", {"seconds": 1.0}, "float8_e4m3fn >= 1.7"),
        ("int8 1 x 1024", {"seconds": 1.0}, "int8 never slower"),
        ("verify", {"seconds": 1.0}, "verification"),
        ("ragged", {"share_of_floor": 0.7}, "one long sequence"),
    ],
)
def test_one_bad_cell_misses_its_goal(name, change, goal):
    rows = good_rows()
    next(row for row in rows if row["name"] == name).update(change)
    assert by_goal(judge(rows, good_figures()), goal).is_met is False


def test_the_engine_is_judged_by_its_own_loads():
    figures = good_figures()
    figures["generate"][0]["decode_tokens_per_s"] = 226.0
    figures["generate"][3]["share_of_floor"] = 0.74
    figures["compiled_after_start"] = 1
    missed = [verdict.goal for verdict in judge(good_rows(), figures) if not verdict.is_met]
    assert len(missed) == 3
    assert all(any(word in goal for goal in missed) for word in ("batch 1:", "at 2k", "after the start"))


def test_what_a_part_left_behind_is_judged_without_the_others(tmp_path, capsys):
    broken = {"kind": "decode", "name": "broken", "error": "no memory"}
    (tmp_path / "kernels-decode.json").write_text(json.dumps([*good_rows(), broken]))
    assert main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "FAILED   broken: no memory" in printed
    assert "MISSING  8B decode, batch 1" in printed
    assert "reached  decode: >= 85 %" in printed
    (tmp_path / "kernels-decode.json").write_text(json.dumps(good_rows()))
    (tmp_path / "check.json").write_text(json.dumps(good_figures()))
    assert main(tmp_path) == 0
