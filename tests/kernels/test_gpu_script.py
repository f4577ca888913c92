"""The script for a GPU, with tiny sizes in the interpreter: so that it runs where there is one."""

from __future__ import annotations

import json

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
