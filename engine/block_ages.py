"""How old the blocks of a pool become, how long they lie unused before they are given away or used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

EVERY = 8  # one block in so many is followed: their ids say nothing about their use, and following costs time


@dataclass(slots=True)
class Ages:
    """In seconds, one entry for each block that it happened to."""

    lifetime_s: list[float] = field(default_factory=list)  # of known content, from being taken to being given to somebody else
    idle_s: list[float] = field(default_factory=list)  # of the same blocks: from the last holder's leave on
    reuse_gap_s: list[float] = field(default_factory=list)  # of a block that was found again: since its last holder's leave


class BlockAges:
    """A BlockObserver with a clock, which the core has none of."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]):
        self._clock = clock
        self._born_s = [0.0] * num_blocks
        self._left_s = [0.0] * num_blocks
        self._ages = Ages()

    def taken(self, block_id: int, was_known: bool) -> None:
        if block_id % EVERY:
            return
        now = self._clock()
        if was_known:
            self._ages.lifetime_s.append(now - self._born_s[block_id])
            self._ages.idle_s.append(now - self._left_s[block_id])
        self._born_s[block_id] = now

    def found_again(self, block_id: int) -> None:
        if block_id % EVERY == 0:
            self._ages.reuse_gap_s.append(self._clock() - self._left_s[block_id])

    def left(self, block_id: int) -> None:
        if block_id % EVERY == 0:
            self._left_s[block_id] = self._clock()

    def news(self) -> Ages:
        """What has happened since the last call."""
        news, self._ages = self._ages, Ages()
        return news
