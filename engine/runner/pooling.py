"""Sums of hidden states, for embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A sum of floating-point numbers depends on where it is cut, and a prompt is computed in chunks of any size.  One of whole
# numbers does not.  With this scale a state's rounding is below float32's own at 1/16, and a million states still fit an int64.
SCALE = float(1 << 28)
LARGEST = float(1 << 15)  # of a state's numbers: they come from a norm, and are a few hundred at most


@dataclass(frozen=True, slots=True)
class PooledSums:
    pooled: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by seq_id: times SCALE
    failed: dict[int, str] = field(default_factory=dict)


def pooled_sums(hidden: Tensor, rows: Iterable[tuple[int, slice]]) -> PooledSums:
    """The sum over some rows of `hidden` [T, hidden] for each sequence, the same bits however its rows come in parts."""
    sums = PooledSums()
    for seq_id, part in rows:
        states = hidden[part].to(torch.float64)
        if not bool((states.abs() < LARGEST).all()):
            sums.failed[seq_id] = "the model gave hidden states that are not finite"
            continue
        sums.pooled[seq_id] = tuple((states * SCALE).round().to(torch.int64).sum(0).tolist())
    return sums
