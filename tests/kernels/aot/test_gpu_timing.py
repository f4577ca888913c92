"""What is timed on a GPU can be made and launched, as far as that can be known without one."""

from __future__ import annotations

import pytest

from pagestream.kernels.bench_cases import Case
from pagestream.kernels.compilation import launches_noted
from pagestream.kernels.gpu_timing import PARTS, Cases, Timing, timed


@pytest.mark.parametrize("part", PARTS)
def test_the_first_cases_of_every_part_launch_something(part):
    cases = Cases(device="cpu", arch=90, num_sms=2, most_tokens=5000)
    timings = list(cases.of_part(part))
    assert len({timing.name for timing in timings}) == len(timings)
    for timing in timings:
        facts = timing.facts
        is_small = facts.get("batch", 1) * facts.get("context", 1) <= 8192 and facts.get("outputs", 1) <= 4096
        if timing.is_first and is_small and facts.get("tokens", 1) <= 64:
            with launches_noted() as launches:
                timing.make().run()
            assert launches, timing.name


def test_a_case_that_fails_leaves_a_row(capsys):
    def make() -> Case:
        raise RuntimeError("no memory")

    rates = {"read": 1.0, "matrix": 1.0}
    assert timed(Timing({"kind": "decode", "batch": 1}, make), rates)["error"] == "RuntimeError: no memory"
    assert "decode 1" in capsys.readouterr().out
