"""One token out of a row's probabilities, for a number in [0, 1): the inverse of the cumulative distribution in token-id order.

Order of truncation: temperature, top-k, top-p over what top-k left, min-p; each keeps one token at least.
All that decides a row's token is computed from that row alone, in an order that depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.errors import InvariantBroken
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.sampling.candidates import first_tokens, top_candidates

MAX_CANDIDATES = 256  # sorted for every row that truncates; a row whose kept set is larger gets a sort of its own
MANY_CANDIDATES = 4096  # of that sort, unless they do not suffice either
SPAN = 256  # tokens summed as one step of the cumulative distribution


@dataclass(frozen=True, slots=True)
class Draw:
    """One token wanted from a row of the logits."""

    row: int
    uniform: float


def draw_tokens(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[Draw]) -> list[int]:
    """One token id per draw.

    logits [R, V] float32, each row with a finite maximum, are changed; params one per row, none of them greedy.
    """
    temperatures = torch.tensor([one.temperature for one in params], device=logits.device, dtype=logits.dtype)[:, None]
    # The maximum goes first: dividing may then underflow, never overflow.
    scores = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures)
    probabilities = torch.softmax(scores, dim=-1)
    truncates = [one.top_p < 1.0 or 0 < one.top_k < logits.shape[-1] for one in params]
    cut = [index for index, draw in enumerate(draws) if truncates[draw.row]]
    full = [index for index, draw in enumerate(draws) if not truncates[draw.row]]
    token_ids = [0] * len(draws)
    if cut:
        for index, token_id in zip(cut, draw_truncated(scores, probabilities, params, [draws[i] for i in cut]), strict=True):
            token_ids[index] = token_id
    if full:
        for index, token_id in zip(full, draw_untruncated(probabilities, params, [draws[i] for i in full]), strict=True):
            token_ids[index] = token_id
    return token_ids


def select(rows_of: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows, in ascending order; the tensor itself where they are all."""
    return rows_of if len(rows) == rows_of.shape[0] else rows_of[list(rows)]


def draw_truncated(
    scores: Tensor, probabilities: Tensor, params: Sequence[SamplingParams], draws: Sequence[Draw]
) -> Iterator[int]:
    """Sort the likeliest tokens of each row once, keep what the row's truncation keeps, and choose among these."""
    rows = sorted({draw.row for draw in draws})
    count = min(MAX_CANDIDATES, max(params[row].top_k if params[row].top_k > 0 else MAX_CANDIDATES for row in rows))
    top = top_candidates(select(scores, rows), count)
    ids = torch.from_numpy(top.token_ids).to(scores.device)
    weights = select(probabilities, rows).gather(-1, ids).cpu().numpy().astype(np.float64)
    kept: dict[int, Kept] = {}
    for index, row in enumerate(rows):
        num_kept = count_kept(weights[index], params[row], scores.shape[-1])
        if num_kept is None:
            kept[row] = keep_many(scores[row], probabilities[row], params[row])
        else:
            kept[row] = Kept.of(top.token_ids[index, :num_kept], weights[index, :num_kept])
    for draw in draws:
        cumulative = kept[draw.row].cumulative
        yield int(kept[draw.row].token_ids[locate(cumulative, draw.uniform * cumulative[-1])])


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row may choose from, by token id."""

    token_ids: NDArray[np.int64]
    cumulative: NDArray[np.float64]  # of their weights

    @classmethod
    def of(cls, token_ids: NDArray[np.int64], weights: NDArray[np.float64]) -> Kept:
        by_id = np.argsort(token_ids)
        return cls(token_ids[by_id], np.cumsum(weights[by_id]))


def count_kept(weights: NDArray[np.float64], params: SamplingParams, vocab_size: int) -> int | None:
    """How many of a row's tokens its truncation keeps; None if the answer lies beyond those given.

    weights [C]: probabilities of the row's C likeliest tokens, likeliest first.
    """
    limit = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    weights = weights[:limit]
    is_complete = len(weights) == limit
    if not is_complete and limit < vocab_size:
        return None
    num_kept = len(weights)
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights)
        total = cumulative[-1] if limit < vocab_size else 1.0
        num_kept = int(np.searchsorted(cumulative, params.top_p * total)) + 1  # the first to reach it is kept too
        if num_kept > len(weights):
            if not is_complete:
                return None
            num_kept = len(weights)
    if params.min_p > 0.0:
        num_kept = max(1, int(np.count_nonzero(weights[:num_kept] >= params.min_p * weights[0])))
    return num_kept


def keep_many(scores: Tensor, probabilities: Tensor, params: SamplingParams) -> Kept:
    """The same for one row, scores [V], that keeps more than MAX_CANDIDATES tokens."""
    row_scores, weights = scores.cpu().numpy(), probabilities.cpu().numpy()
    vocab_size = len(row_scores)
    for count in (params.top_k,) if 0 < params.top_k < vocab_size else (MANY_CANDIDATES, vocab_size):
        token_ids = first_tokens(row_scores, count)
        ordered = weights[token_ids].astype(np.float64)
        num_kept = count_kept(ordered, params, vocab_size)
        if num_kept is not None:
            return Kept.of(token_ids[:num_kept], ordered[:num_kept])
    raise InvariantBroken("the whole vocabulary does not reach top_p")


def draw_untruncated(probabilities: Tensor, params: Sequence[SamplingParams], draws: Sequence[Draw]) -> Iterator[int]:
    """Find the span of token ids first, then the token inside it, so that a row is summed in parallel and never sorted."""
    rows = sorted({draw.row for draw in draws})
    weights = select(probabilities, rows)
    if any(params[row].min_p > 0.0 for row in rows):
        min_p = torch.tensor([params[row].min_p for row in rows], device=weights.device, dtype=weights.dtype)[:, None]
        weights = torch.where(weights >= min_p * weights.amax(-1, keepdim=True), weights, 0.0)
    cumulative = np.cumsum(span_sums(weights).cpu().numpy().astype(np.float64), axis=-1)
    index_of = {row: index for index, row in enumerate(rows)}
    owners = [index_of[draw.row] for draw in draws]
    targets = [draw.uniform * cumulative[owner, -1] for owner, draw in zip(owners, draws, strict=True)]
    spans = [locate(cumulative[owner], target) for owner, target in zip(owners, targets, strict=True)]
    vocab_size = weights.shape[-1]
    columns = torch.tensor([span * SPAN for span in spans], device=weights.device)[:, None] + torch.arange(SPAN, device=weights.device)
    inside = weights[torch.tensor(owners, device=weights.device)[:, None], columns.clamp(max=vocab_size - 1)]
    in_spans = torch.where(columns < vocab_size, inside, 0.0).cpu().numpy().astype(np.float64)
    for owner, target, span, in_span in zip(owners, targets, spans, in_spans, strict=True):
        before = cumulative[owner, span - 1] if span else 0.0
        yield span * SPAN + locate(np.cumsum(in_span), target - before)


def span_sums(weights: Tensor) -> Tensor:
    """Sums over each SPAN of columns, the last one shorter.  weights [D, V]; returns [D, ceil(V / SPAN)]."""
    vocab_size = weights.shape[-1]
    rest = vocab_size % SPAN
    sums = [weights[:, vocab_size - rest :].sum(-1, keepdim=True)] if rest else []
    if vocab_size >= SPAN:
        sums.insert(0, weights[:, : vocab_size - rest].unflatten(-1, (-1, SPAN)).sum(-1))
    return torch.cat(sums, dim=-1)


def locate(cumulative: NDArray[np.float64], target: float) -> int:
    """The first index whose cumulative weight exceeds the target; at most the last that has a weight at all."""
    return int(min(np.searchsorted(cumulative, target, side="right"), np.searchsorted(cumulative, cumulative[-1])))
