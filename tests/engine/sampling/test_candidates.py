from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.engine.sampling.candidates import Candidates, candidates_of_keys, top_candidates, top_keys
from pagestream.engine.sampling.logprobs import LaunchedScores, score_tokens


def of_keys(scores: torch.Tensor, count: int) -> Candidates:
    return candidates_of_keys(top_keys(scores, count).numpy())


def naive(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:count]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 30).flatmap(
        lambda size: st.lists(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 2.0, 3.25]), min_size=size, max_size=size), min_size=1, max_size=4)
    ),
    count=st.integers(1, 40),
)
def test_order_equals_a_plain_sort_with_ties(rows, count):
    for find in (top_candidates, of_keys):
        top = find(torch.tensor(rows), count)
        assert top.token_ids.tolist() == [naive(row, count) for row in rows]
        assert top.scores.tolist() == [[row[token_id] for token_id in naive(row, count)] for row in rows]


@pytest.mark.parametrize("count", [1, 5, 64, 5000])
def test_large_rows_with_many_ties(count):
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    for find in (top_candidates, of_keys):
        assert find(scores, count).token_ids.tolist() == [naive(row, count) for row in scores.tolist()]


def test_ruled_out_tokens_come_last():
    scores = torch.full((2, 1000), -torch.inf)
    scores[0, [7, 3]] = torch.tensor([1.0, 2.0])
    scores[1, 999] = -5.0
    for find in (top_candidates, of_keys):
        top = find(scores, 10)
        assert top.token_ids[0, :2].tolist() == [3, 7]
        assert top.token_ids[1, 0] == 999


@pytest.mark.parametrize("num_tops", [[0, 0, 0, 0], [5, 0, 20, 1]])
def test_scores_launched_before_the_tokens_are_known_are_those_of_the_host(num_tops):
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)).bfloat16().float()  # many of them equal
    logits[1, 100:] = -torch.inf
    logprobs, token_ids = torch.log_softmax(logits, dim=-1), [7, 50, 2999, int(logits[3].argmax())]
    launched = LaunchedScores.of(logprobs, torch.tensor(token_ids), num_tops)
    got = launched.entries(token_ids, [tensor.numpy() for tensor in launched.tensors])
    assert got == score_tokens(logprobs, token_ids, num_tops)
