"""A bar for what may take long at the start, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

PROGRESS_AFTER_S = 1.0  # a bar for what takes less would only flicker


def shown(items: Sequence[Item], what: str, unit: str) -> Iterable[Item]:
    """The items, one after the other."""
    from tqdm import tqdm

    return tqdm(items, desc=what, unit=unit, delay=PROGRESS_AFTER_S, disable=None, leave=False)
