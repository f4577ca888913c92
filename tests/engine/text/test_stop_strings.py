"""Stop strings, against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagestream.engine.text.stop_strings import StopStrings


def naive(text: str, stops: list[str], included: bool) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if included else end - len(stop)], stop


def run(pieces: list[str], stops: list[str], included: bool = False) -> tuple[list[str], str | None]:
    """What is sent for each piece, up to the stop or with the flush at the end."""
    ending = StopStrings(stops, include_in_output=included)
    sent = []
    for piece in pieces:
        sent.append(ending.push(piece))
        if ending.matched is not None:
            return sent, ending.matched
    return [*sent, ending.flush()], None


@st.composite
def cut_texts(draw):
    text = draw(st.text("ab\n", max_size=14))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=cut_texts(), stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4), included=st.booleans())
def test_every_cut_gives_what_a_search_in_the_whole_gives(pieces, stops, included):
    sent, matched = run(pieces, stops, included)
    assert ("".join(sent), matched) == naive("".join(pieces), stops, included)


@given(pieces=cut_texts(), stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_than_could_become_a_stop(pieces, stops):
    ending = StopStrings(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += ending.push(piece)
        if ending.matched is not None:
            return
        held = seen[len(sent) :]
        longer = [seen[start:] for start in range(len(sent))]
        assert seen == sent + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(stop.startswith(suffix) for stop in stops for suffix in longer)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_that_begins_again_inside_itself(cut):
    sent, matched = run(["aaab!"[:cut], "aaab!"[cut:]], ["aab"])
    assert ("".join(sent), matched) == ("a", "aab")


def test_the_first_complete_match_wins():
    assert run(list("abcd"), ["abcd", "bc"]) == (["", "", "a"], "bc")
    assert run(["abcd"], ["cd", "bcd"]) == (["a"], "bcd")


def test_no_stop_strings_hold_nothing():
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_text_after_the_stop_is_a_bug():
    ending = StopStrings(["x"])
    ending.push("ax")
    with pytest.raises(AssertionError):
        ending.push("b")
