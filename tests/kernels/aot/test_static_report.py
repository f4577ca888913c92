"""The report of a machine without a GPU: every kernel once for each target, figures that belong to it, and all of it in the file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pagestream.kernels import bench
from pagestream.kernels.bench_cases import copy_case, elementwise_cases, quant_matmul_case
from pagestream.kernels.static_analysis import TARGETS, StaticFigures, figures_of, launches_compiled

KERNELS = {
    "_plan_kernel", "_paged_attention_kernel", "_paged_prefill_kernel", "_rms_norm_kernel", "_swiglu_kernel",
    "_reshape_and_cache_kernel", "_copy_blocks_kernel", "_scores_kernel", "_draw_kernel", "_quant_matmul_kernel", "_unpack_kernel",
}  # fmt: skip


def without_addresses(figures: StaticFigures) -> StaticFigures:
    """Branches name addresses, which depend on what lies before."""
    return dataclasses.replace(figures, loop=tuple(text.partition(" 0x")[0] for text in figures.loop))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_figures_do_not_depend_on_what_is_read_beside(target):
    with launches_compiled(TARGETS[target]) as launches:
        quant_matmul_case(1, "cpu", bits=8, group=128, num_inputs=1024).run()
        copy_case(1, "cpu", num_layers=1).run()
        for case in elementwise_cases(2, "cpu"):
            case.run()
        quant_matmul_case(1, "cpu", bits=4, group=32, num_inputs=1024).run()
    together = figures_of([launch.kernel for launch in launches])
    assert [figures.name for figures in together] == [launch.name for launch in launches]
    for place in (0, 1, -1):
        alone = figures_of([launches[place].kernel])
        assert without_addresses(together[place]) == without_addresses(*alone)
    first, last = together[0], together[-1]
    assert first.matrix_unit == last.matrix_unit != "none"
    assert {figures.matrix_unit for figures in together[1:-1]} == {"none"}
    if target != "gfx942":
        assert 0 < first.loop_instructions != last.loop_instructions > 0
    assert figures_of([]) == []


def test_the_report_has_every_kernel_of_its_target(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    bench.main(["--quick", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["target"] for row in rows} == {"sm_90"}
    labels = [(row["kernel"], row["case"]) for row in rows]
    assert len(set(labels)) == len(labels)
    assert all(row["registers"] > 0 and row["spill_bytes"] == 0 for row in rows)
    of_decode = {row["case"].rsplit(" ", 1)[1]: row for row in rows if row["kernel"] == "_paged_attention_kernel"}
    assert set(of_decode) == {"bfloat16", "int8", "float8_e4m3fn"}
    assert all(row["issue_bound"] > 1e12 and row["bytes_in_flight_per_sm"] > 0 for row in of_decode.values())
    assert of_decode["bfloat16"]["loop_instructions"] < of_decode["int8"]["loop_instructions"]
    printed = capsys.readouterr().out
    assert all(row["kernel"] in printed and row["case"] in printed for row in rows)
