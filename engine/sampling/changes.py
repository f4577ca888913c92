"""What processors do to single logits, said in lists: for a chooser that has a kernel apply them instead of one after another.

Order of application: biases, penalties, what is ruled out, masks; the same as that of the processors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class RowChanges:
    """Of one row.  No token stands twice among the biases, nor among those said."""

    bias_ids: NDArray[np.int64] | None = None
    biases: NDArray[np.float32] | None = None
    said_ids: NDArray[np.int64] | None = None  # what the penalties of the row's parameters concern
    said_counts: NDArray[np.float32] | None = None  # 0: in the prompt only
    ruled_out: list[NDArray[np.int64]] = field(default_factory=list)
    masks: list[NDArray[np.int32]] = field(default_factory=list)  # bit t % 32 of word t // 32 allows t; past the end nothing is


class StepChanges:
    """By row of a step; a row that nobody changes costs nothing."""

    def __init__(self) -> None:
        self.rows: dict[int, RowChanges] = {}

    def of(self, row: int) -> RowChanges:
        return self.rows.setdefault(row, RowChanges())


@runtime_checkable
class ListedProcessor(Protocol):
    """A LogitsProcessor that can also say what its `apply` would do."""

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        """Add what is to be done to the rows of its own sequences, row r being that of seq_ids[r]."""


def as_bits(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """A mask that allows these tokens."""
    ids = np.array(token_ids, np.int64)
    words = np.zeros(int(ids.max(initial=-1)) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return words.view(np.int32)
