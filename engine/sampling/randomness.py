"""Random numbers without a generator: a pure function of whose number it is and for which position.

So a seeded answer is the same whatever runs beside it, after a preemption, and when a step is repeated.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at that position of the sequence with that seed.

    Source: Steele, Lea and Flood 2014, SplitMix64; the seed is mixed on its own first, so that seeds 7 and 8 share nothing.
    """
    state = mix((seed + GOLDEN) & MASK)
    return (mix((state + (position + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """A bijection of 64 bits in which every input bit moves every output bit with even odds."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
