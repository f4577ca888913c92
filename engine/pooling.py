"""A prompt's embedding, from the sums that the steps bring."""

from __future__ import annotations

import math
import struct


class EmbeddingSum:
    """The sum of a prompt's hidden states as far as they are pooled."""

    __slots__ = ("_sum",)

    def __init__(self) -> None:
        self._sum: tuple[int, ...] = ()

    def add(self, start: int, states: tuple[int, ...]) -> None:
        """The states of a row that begins at `start`.  At 0 the prompt begins, perhaps again, after a preemption."""
        self._sum = states if start == 0 or not self._sum else tuple(map(sum, zip(self._sum, states, strict=True)))

    def direction(self) -> tuple[float, ...]:
        """The embedding: of length 1, in numbers that float32 holds.  The mean's divisor cancels out with the length.

        States that sum up to nothing have no direction: zeros, as everybody's normalisation leaves them.
        """
        length = math.sqrt(sum(value * value for value in self._sum)) or 1.0
        numbers = [value / length for value in self._sum]
        return struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers))
