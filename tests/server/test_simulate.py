"""`pagestream simulate` on the command line."""

import json

import pytest

from tests.server.terminal import complaint, run_here


def test_generates_writes_and_replays_a_trace(tmp_path):
    path = str(tmp_path / "trace.jsonl")
    machine = ("--num-kv-blocks", "200", "--max-num-seqs", "8", "--step-s", "0.01", "--json")
    made = run_here("simulate", "--generate", "60", "--load", "0.9", "--seed", "2", "--write-trace", path, *machine)
    assert made.returncode == 0, made.stderr
    replayed = json.loads(run_here("simulate", "--trace", path, *machine).stdout)
    assert replayed == json.loads(made.stdout)
    assert replayed["num_finished"] == 60
    assert replayed["costs"]["step_s"] == 0.01


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--trace"),
        (("--generate", "5"), "--rate"),
        (("--generate", "5", "--rate", "0"), "rate"),
        (("--generate", "5", "--load", "-1"), "--load must be a share above 0, not -1"),
        (("--generate", "5", "--load", "nan"), "--load"),
        (("--generate", "5", "--rate", "1", "--preemption-mode", "never"), "--preemption-mode"),
        (("--trace", "/does/not/exist.jsonl"), "exist.jsonl"),
        (("--generate", "5", "--rate", "1", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "max_num_batched_tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, word):
    assert word in complaint("simulate", *arguments)
