"""The likeliest tokens of each row, in one order for everybody: higher score first, lower token id first among equals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ID_BITS = np.uint64(32)
ID_MASK = np.uint64((1 << 32) - 1)
ID_LIMIT = (1 << 32) - 1


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
    found, found_ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    token_ids = in_order(found, found_ids)[:, :count]
    if found.shape[-1] > count:
        first_left_out = found[:, count]
        for row in np.flatnonzero((found[:, count - 1] == first_left_out) & (first_left_out > -np.inf)):
            token_ids[row] = first_tokens(scores[row].cpu().numpy(), count)
    # topk sorts, so the scores stand in their places already, whichever of equals they belong to.
    return Candidates(token_ids, found[:, :count])


def top_keys(scores: Tensor, count: int) -> Tensor:
    """The same without looking at any number, so that the host need not wait for one: keys for `candidates_of_keys`.

    scores [R, V] float32; returns [R, count] int64, count being cut to V.  Exact among -inf too; what stands for NaN is left open.
    """
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return ((ordered << 32) | (ID_LIMIT - ids)).topk(min(count, scores.shape[-1])).values


def candidates_of_keys(keys: NDArray[np.int64]) -> Candidates:
    ordered = (keys >> 32).astype(np.int32)
    bits = np.where(ordered < 0, ordered ^ np.int32(0x7FFFFFFF), ordered)
    return Candidates(ID_LIMIT - (keys & ID_LIMIT), bits.view(np.float32))


def first_tokens(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the first `count` tokens of one row, scores [V]."""
    num_others = len(scores) - count
    if num_others <= 0:
        return in_order(scores, np.arange(len(scores)))
    lowest = np.partition(scores, num_others)[num_others]
    token_ids = np.flatnonzero(scores >= lowest)
    return in_order(scores[token_ids], token_ids)[:count]


def in_order(scores: NDArray[np.float32], token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids [..., N], sorted along the last axis by descending score and, among equals, by ascending id.

    Score and id are packed into one integer: sorting those is several times faster than a stable sort by score.
    """
    bits = (scores + np.float32(0.0)).view(np.uint32)  # adding 0 makes -0.0 the 0.0 that it equals
    descending = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = (descending.astype(np.uint64) << ID_BITS) | token_ids.astype(np.uint64)
    keys.sort(axis=-1)
    return (keys & ID_MASK).astype(np.int64)
