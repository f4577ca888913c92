"""The script for a GPU, with tiny sizes in the interpreter: so that it runs where there is one."""

from __future__ import annotations

import json

import pytest

from pagestream.kernels.compilation import launches_noted
from pagestream.kernels.gpu_timing import PARTS, Cases, Timing, timed
from tests.gpu import end_to_end


def test_figures_of_every_load(tmp_path, capsys):
    out = tmp_path / "check.json"
    end_to_end.main(["--dry", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert [row["batch_size"] for row in figures["generate"]] == [load.batch_size for load in end_to_end.DRY_LOADS]
    assert all(row["decode_tokens_per_s"] > 0 and row["floor_step_s"] > 0 for row in figures["generate"])
    assert all(row["num_decode_steps"] > 0 and row["prompt_tokens_per_s"] > 0 for row in figures["generate"])
    assert figures["compiled_after_start"] == 0
    assert "of floor" in capsys.readouterr().out


@pytest.mark.parametrize("part", PARTS)
def test_the_first_cases_of_every_part_launch_something(part):
    cases = Cases(device="cpu", arch=90, num_sms=2, most_tokens=5000)
    timings = list(cases.of_part(part))
    assert len({timing.name for timing in timings}) == len(timings)
    for timing in timings:
        if timing.is_first and timing.facts.get("rows", 1) == 1:
            with launches_noted() as launches:
                assert timing.make().run() is not None
            assert launches


def test_a_case_that_fails_leaves_a_row(capsys):
    def make():
        raise RuntimeError("no memory")

    rates = {"read": 1.0, "matrix": 1.0}
    assert timed(Timing({"kind": "decode", "batch": 1}, make), rates)["error"] == "RuntimeError: no memory"
    assert "decode 1" in capsys.readouterr().out
