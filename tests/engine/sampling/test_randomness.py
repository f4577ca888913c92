from __future__ import annotations

import numpy as np

from pagestream.engine.sampling.randomness import mix, uniform


def test_numbers_of_one_seed_are_uniform():
    numbers = np.array([uniform(7, position) for position in range(20_000)])
    counts = np.histogram(numbers, bins=100, range=(0.0, 1.0))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_neighbouring_seeds_share_nothing():
    first, second = (np.array([uniform(seed, position) for position in range(5_000)]) for seed in (7, 8))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert not set(first) & set(second)
    by_seed = np.array([uniform(seed, 3) for seed in range(20_000)])
    counts = np.histogram(by_seed, bins=100, range=(0.0, 1.0))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)


def test_all_seeds_of_64_bits_are_taken():
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]
    numbers = {uniform(seed, position) for seed in seeds for position in (0, 1, 8191)}
    assert len(numbers) == 15
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_mix_is_the_published_function():
    """The first outputs of SplitMix64 for the seed 1234567, as its reference implementation gives them."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
