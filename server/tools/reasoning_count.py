"""How many of an answer's tokens were reasoning, counted on the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagestream.server.tools.reply import END_THINK, THINK

OVERLAP = 16  # tokens: more than the mark's characters, so that it is found wherever it begins


class ReasoningCounter:
    """The marks count as reasoning, as tokens that were generated for it.  `decode` shows special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], *, starts_inside: bool):
        self._decode = decode
        self._is_inside = starts_inside
        self._is_over = False
        self._token_ids: list[int] = []
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> None:
        if self._is_over or not token_ids:
            return
        start = max(0, len(self._token_ids) - OVERLAP)
        self._token_ids += token_ids
        if not self._is_inside:
            text = self._decode(self._token_ids).lstrip()
            if not text.startswith(THINK):
                self._is_over = not THINK.startswith(text)
                return
            self._is_inside, start = True, 0
        self.num_tokens = len(self._token_ids)
        if END_THINK in self._decode(self._token_ids[start:]):
            self._is_over = True
            self.num_tokens = self._end_of_mark(start)

    def _end_of_mark(self, start: int) -> int:
        """The number of tokens up to the one that completes the mark, which is known to come after `start`."""
        low, high = start, len(self._token_ids)
        while high - low > 1:
            middle = (low + high) // 2
            if END_THINK in self._decode(self._token_ids[start:middle]):
                high = middle
            else:
                low = middle
        return high
