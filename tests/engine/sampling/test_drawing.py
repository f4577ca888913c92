"""What is drawn, against probabilities worked out in float64 one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.sampling.drawing import Draw, draw_tokens, locate
from pagestream.engine.sampling.randomness import uniform

CASES = {
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 12},
    "top_k above the sorted part": {"top_k": 300, "temperature": 2.0},
    "top_k above the vocabulary": {"top_k": 100_000, "temperature": 0.8},
    "top_p": {"top_p": 0.8, "temperature": 0.9},
    "top_p above the sorted part": {"top_p": 0.97, "temperature": 2.0},
    "top_p of nearly all": {"top_p": 0.9999999, "temperature": 2.0},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.2},
}


def expected(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token id -> probability, from the definitions."""
    best = max(logits)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[token_id] for token_id in order)
    kept, mass = [], 0.0
    for token_id in order:
        if mass >= params.top_p * total:
            break
        kept.append(token_id)
        mass += weights[token_id]
    kept = [token_id for token_id in kept if weights[token_id] >= params.min_p * weights[order[0]]]
    total = sum(weights[token_id] for token_id in kept)
    return {token_id: weights[token_id] / total for token_id in kept}


def some_logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("vocab_size", [50, 700, 6000])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_fit_the_probabilities(case, vocab_size):
    params = SamplingParams(**CASES[case])
    logits = some_logits(vocab_size)
    num_draws = 20_000
    drawn = draw_tokens(logits[None].clone(), [params], [Draw(0, uniform(5, position)) for position in range(num_draws)])
    probability = expected(logits.tolist(), params)
    counts = np.bincount(drawn, minlength=vocab_size)
    assert set(np.flatnonzero(counts)) <= set(probability), "only kept tokens are drawn"
    likely = [token_id for token_id, p in probability.items() if p * num_draws >= 5]
    wanted = np.array([probability[token_id] * num_draws for token_id in likely])
    rest = num_draws - wanted.sum()
    chi2 = ((counts[likely] - wanted) ** 2 / wanted).sum() + (num_draws - counts[likely].sum() - rest) ** 2 / max(rest, 5.0)
    assert chi2 < len(likely) + 5 * math.sqrt(2 * len(likely)) + 5


@pytest.mark.parametrize("vocab_size", [50, 700])
@pytest.mark.parametrize("case", CASES)
def test_the_inverse_is_exact_at_every_border(case, vocab_size):
    """Just inside each token's part of [0, 1), in token-id order, that token is drawn."""
    params = SamplingParams(**CASES[case])
    logits = some_logits(vocab_size, seed=3)
    probability = expected(logits.tolist(), params)
    draws, owners, start = [], [], 0.0
    for token_id in sorted(probability):
        end = start + probability[token_id]
        if probability[token_id] > 1e-4:
            draws += [Draw(0, start + 1e-5), Draw(0, end - 1e-5)]
            owners += [token_id, token_id]
        start = end
    assert draw_tokens(logits[None].clone(), [params], draws) == owners


def test_kept_sets_equal_transformers():
    logits = some_logits(600, seed=4)[None]
    params = SamplingParams(top_k=80, top_p=0.85, min_p=0.03)
    kept = logits
    for warper in (TopKLogitsWarper(80), TopPLogitsWarper(0.85), MinPLogitsWarper(0.03)):
        kept = warper(torch.zeros(1, 1, dtype=torch.long), kept)
    drawn = draw_tokens(logits.clone(), [params], [Draw(0, (number + 0.5) / 20_000) for number in range(20_000)])
    assert set(drawn) == set(torch.isfinite(kept[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 300}, {"top_p": 0.5, "top_k": 7}])
def test_among_equals_the_lower_ids_are_kept(fields):
    params = SamplingParams(**fields)
    logits = torch.zeros(1, 1000)
    drawn = draw_tokens(logits.clone(), [params], [Draw(0, number / 1000) for number in range(1000)])
    num_kept = len(expected([0.0] * 1000, params))
    assert set(drawn) == set(range(num_kept))


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_ruled_out_tokens_are_never_drawn(fields, number):
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, [700, 1500, 1501]] = 1.0
    drawn = draw_tokens(logits.clone(), [SamplingParams(**fields)], [Draw(0, number)])
    assert drawn == [700 if number == 0.0 else 1501]


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-4, "top_p": 1e-4}, {"temperature": 1.1e-5}, {"top_p": 1e-30}, {"min_p": 1.0}, {"temperature": 2e-5, "top_k": 3}]
)
def test_extreme_values_give_the_likeliest(fields):
    logits = some_logits(5000, seed=6)[None] * 1e4
    drawn = draw_tokens(logits.clone(), [SamplingParams(**fields)], [Draw(0, number / 50) for number in range(50)])
    assert set(drawn) == {int(logits.argmax())}


def test_locate_skips_what_has_no_weight():
    cumulative = np.array([0.0, 0.5, 0.5, 1.0, 1.0])
    assert [locate(cumulative, target) for target in (0.0, 0.49, 0.5, 0.99, 1.0)] == [1, 1, 3, 3, 3]
