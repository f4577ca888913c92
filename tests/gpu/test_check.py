"""The script itself, with a stand-in for python: what it runs, and what it does after a failure."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("check.sh")
GRACE_S = 3
STAND_IN = """#!/bin/sh
echo "$*" >>"$RECORD"
case "$*" in *"$BROKEN"*) echo "FAILED something"; exit 3;; esac
"""


def run(tmp_path: Path, broken: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    python, record = tmp_path / "python", tmp_path / "record"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    record.touch()
    env = os.environ | {"PYTHON": str(python), "RECORD": str(record), "BROKEN": broken}
    env.pop("CHECK_DRY", None)
    done = subprocess.run([str(SCRIPT), str(tmp_path / "figures")], env=env, capture_output=True, text=True, timeout=60)
    return done, record.read_text().splitlines()


def test_every_part_runs_once_and_the_goals_come_last(tmp_path):
    done, commands = run(tmp_path, "nothing is broken")
    assert done.returncode == 0, done.stderr
    for part in ("decode", "prefill", "variants", "other"):
        assert sum(f"kernels.bench --part {part} --json {tmp_path}/figures/kernels-{part}.json" in line for line in commands) == 1
    assert sum("end_to_end.py" in line for line in commands) == 1
    assert commands[-1].startswith("tests/gpu/goals.py")
    assert 1 <= sum("tests/gpu/test_kernels.py" in line for line in commands) <= 12
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["tests.log"]  # the stand-in writes no figures


def test_all_times_together_are_less_than_eight_minutes():
    """Each part's, and what it may take to be killed after it; parts in a loop count as often as they run."""
    total = 0.0
    repeats = 1
    for line in SCRIPT.read_text().splitlines():
        if loop := re.match(r"for \w+ in ([a-z ]+); do", line):
            repeats = len(loop.group(1).split())
        elif line == "done":
            repeats = 1
        if limit := re.search(r"timeout -k (\d+) (\d+)", line):
            total += int(limit.group(1)) + int(limit.group(2))  # the tests' processes run side by side
        elif limit := re.match(r'\s*run "\S+" (\d+) ', line):
            total += repeats * (int(limit.group(1)) + GRACE_S)
    assert re.search(rf'timeout -k {GRACE_S} "\$limit"', SCRIPT.read_text())
    assert 300 < total < 8 * 60


@pytest.mark.parametrize("broken", ["test_kernels.py", "--part decode", "end_to_end.py", "goals.py"])
def test_what_fails_is_told_and_stops_nothing(tmp_path, broken):
    whole = len(run(tmp_path, "nothing is broken")[1])
    (tmp_path / "record").unlink()
    done, commands = run(tmp_path, broken)
    assert done.returncode == 1
    assert len(commands) == whole
    if broken == "test_kernels.py":
        assert "FAILED something" in done.stdout


def test_without_a_gpu_there_is_nothing_to_check(tmp_path):
    done, commands = run(tmp_path, "torch.cuda.is_available")
    assert done.returncode == 0
    assert "no GPU here" in done.stdout
    assert len(commands) == 1
