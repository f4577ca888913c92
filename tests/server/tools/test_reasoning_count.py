"""Reasoning tokens against a count by hand, however the tokens come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.server.tools.plan import Parsers
from pagestream.server.tools.reasoning_count import ReasoningCounter
from tests.server.conftest import running

PIECES = ["<think>", "</think>", "<", "/", "th", "ink", ">", "\n", "a", "hm", "京"]


def decode(token_ids) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids)


def by_hand(token_ids: list[int], starts_inside: bool) -> int:
    if not starts_inside and not decode(token_ids).lstrip().startswith("<think>"):
        return 0
    return next((size for size in range(1, len(token_ids) + 1) if "</think>" in decode(token_ids[:size])), len(token_ids))


@pytest.mark.parametrize("starts_inside", [True, False])
@settings(deadline=None, max_examples=300)
@given(
    begins=st.sampled_from([[], [0], [7, 0], [2, 4, 5, 6], [2, 4]]),
    middle=st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9, 10]), max_size=40),
    ends=st.sampled_from([[], [1], [2, 3, 4, 5, 6]]),
    rest=st.lists(st.integers(0, 10), max_size=30),
    cuts=st.sets(st.integers(1, 80)),
)
def test_every_way_of_cutting_gives_the_count_by_hand(starts_inside, begins, middle, ends, rest, cuts):
    token_ids = [*begins, *middle, *ends, *rest]
    counter = ReasoningCounter(decode, starts_inside=starts_inside)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        counter.push(token_ids[start:end])
    assert counter.num_tokens == by_hand(token_ids, starts_inside)


def test_usage_tells_them_on_every_route():
    inside = [{"role": "assistant", "content": "<think>"}]
    asked = {"messages": inside, "max_tokens": 12, "temperature": 0}
    with running(parsers=Parsers(reasoning="think")) as live:
        body = live.post("/v1/chat/completions", **asked, continue_final_message=True, ignore_eos=True).json()
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
        plain = live.chat("Hello", max_tokens=12, ignore_eos=True).json()
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        response = live.post("/v1/responses", input="Hello", max_output_tokens=8).json()
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
