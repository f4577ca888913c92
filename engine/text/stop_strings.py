"""Ends a text at its stop string, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text in, text that can be sent out; the same whatever pieces the text comes in.

    The match that is complete first wins; of two that end at the same character, the longer.  Unlike a search for the match that
    begins first, this never has to wait for a longer stop string once a shorter one inside it is complete.
    Invariant: sent text + held text = all text so far, and the held text is its longest suffix that begins a stop string.
    """

    __slots__ = ("_held", "_included", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False):
        self._stops = tuple(dict.fromkeys(stops))
        self._included = include_in_output
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The text that can be sent now.  Once `matched` is set, this was the last: no more may be pushed."""
        assert self.matched is None, "text after its stop"
        if not self._stops:
            return text
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._held = ""
            self.matched = text[start:end]
            return text[:end] if self._included else text[:start]
        keep = min(self._possible_start(stop, text) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held, for a text that ended otherwise."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _possible_start(stop: str, text: str) -> int:
        """Where the longest suffix of text that is a proper prefix of stop begins; len(text) for none."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return start
            start = text.find(stop[0], start + 1)
        return len(text)
