"""Seeds: everything random is a pure function of a seed and a place, so that no stream depends on company."""

from __future__ import annotations

MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """64 well-mixed bits of some whole numbers.  Source: Steele, Lea and Flood 2014, SplitMix64's finalizer, chained."""
    state = 0
    for part in parts:
        state = (state ^ (part & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def seed_of_answer(seed: int, index: int) -> int:
    """The seed of the index-th of a request's n answers."""
    return mix(seed, index)
