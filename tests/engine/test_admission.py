"""How many may wait, counted against the plain definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagestream.engine.admission import AdmissionControl, QueueLimits
from pagestream.engine.core.errors import Overloaded

SIZES = st.lists(st.integers(1, 5), max_size=12)


def control(running: list[int], waiting: list[int], limits: QueueLimits, max_num_seqs: int) -> tuple[AdmissionControl, list[str]]:
    """With groups of so many sequences, each of 10 prompt tokens; also gives the reasons of its refusals, as they come."""

    def groups(sizes: list[int]) -> list[Any]:
        return [SimpleNamespace(num_live_sequences=size, request=SimpleNamespace(prompt_token_ids=[1] * 10)) for size in sizes]

    reasons: list[str] = []
    engine: Any = SimpleNamespace(
        intake=SimpleNamespace(limits=SimpleNamespace(max_num_seqs=max_num_seqs)),
        scheduler=SimpleNamespace(running=groups(running), swapped=[], waiting=groups(waiting)),
        watch=SimpleNamespace(rejected=reasons.append),
    )
    return AdmissionControl(engine, limits), reasons


def num_waiting(sizes: list[int], max_num_seqs: int) -> int:
    """All from the first one on that does not fit beside those before it."""
    fitting = [at for at in range(len(sizes)) if sum(sizes[: at + 1]) <= max_num_seqs]
    return len(sizes) - len(fitting)


@given(SIZES, SIZES, st.integers(0, 8), st.integers(1, 10), st.integers(1, 6), st.integers(1, 4))
def test_a_request_comes_in_exactly_while_the_queue_has_room(running, waiting, max_num_reqs, max_num_seqs, number, size):
    admission, reasons = control(running, waiting, QueueLimits(max_num_reqs, None), max_num_seqs)
    sizes = running + waiting
    is_full = num_waiting([*sizes, *[size] * number], max_num_seqs) > max_num_reqs
    if is_full:
        told = f"^the queue holds {max_num_reqs} waiting requests at most; there are {num_waiting(sizes, max_num_seqs)}$"
        with pytest.raises(Overloaded, match=told):
            admission.check(number, size, [])
    else:
        admission.check(number, size, [])
    assert reasons == ["queue_full"] * is_full
    coming = [count for count in range(number + 1) if num_waiting([*sizes, *[1] * count], max_num_seqs) <= max_num_reqs]
    assert admission.num_admissible(number, []) == max(coming, default=0)


def test_those_whose_tokens_would_wait_do_not_come_in():
    admission, _ = control([1, 1], [1], QueueLimits(100, 5), max_num_seqs=4)
    assert admission.num_admissible(3, []) == 1, "one place to run is left, and 10 tokens wait"
    with pytest.raises(Overloaded, match="10 prompt tokens are waiting"):
        admission.check(2, 1, [])


def test_while_the_server_ends_nothing_comes_in():
    admission, reasons = control([], [], QueueLimits(100, None), max_num_seqs=4)
    admission.is_draining = True
    assert admission.num_admissible(3, []) == 0
    with pytest.raises(Overloaded):
        admission.check(1, 1, [])
    assert reasons == ["draining"]
