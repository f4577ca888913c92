"""The likeliest tokens of each row, in one order for everybody: higher score first, lower token id first among equals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """The first `count` tokens of each row in that order, on the host."""

    token_ids: NDArray[np.int64]  # [R, count]
    scores: NDArray[np.float32]  # [R, count]


def top_candidates(scores: Tensor, count: int) -> Candidates:
    """scores [R, V] float32 without NaN; count is cut to V.

    Exact also where equal scores meet at the cut, which topk alone leaves open; among -inf it stays open.
    """
    count = min(count, scores.shape[-1])
    top = scores.topk(min(count + 1, scores.shape[-1]))
    found_scores, found_ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    order = np.argsort(found_ids, axis=-1)
    order = np.take_along_axis(order, np.argsort(-np.take_along_axis(found_scores, order, -1), axis=-1, kind="stable"), -1)
    chosen = Candidates(np.take_along_axis(found_ids, order, -1)[:, :count], np.take_along_axis(found_scores, order, -1)[:, :count])
    if found_scores.shape[-1] > count:
        first_left_out = found_scores[:, count]
        for row in np.flatnonzero((found_scores[:, count - 1] == first_left_out) & (first_left_out > -np.inf)):
            chosen.token_ids[row], chosen.scores[row] = settle_ties(scores[row].cpu().numpy(), first_left_out[row], count)
    return chosen


def settle_ties(scores: NDArray[np.float32], lowest: np.float32, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The first `count` of all tokens that score at least `lowest`."""
    token_ids = np.flatnonzero(scores >= lowest)
    token_ids = token_ids[np.argsort(-scores[token_ids], kind="stable")][:count]
    return token_ids, scores[token_ids]
