"""Logprobs of chosen and likeliest tokens.

They are the model's own: before temperature, penalties and masks.  So they say the same of a text whoever sampled it and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.step_plan import TokenLogprobs
from pagestream.engine.sampling.candidates import Candidates, candidates_of_keys, top_candidates, top_keys

LOWEST_LOGPROB = -9999.0  # of tokens that the model rules out: JSON has no infinity


def score_tokens(logprobs: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token of each row, with as many of the likeliest beside it as that row asks for.

    Shapes: logprobs [R, V] float32, one row per token id.  Among equals the lower id ranks first, as in greedy sampling.
    """
    ids = torch.tensor(token_ids, device=logprobs.device)[:, None]
    chosen = logprobs.gather(-1, ids)
    # Counted in float32, exact below 2**24 and several times faster than adding up booleans.
    ahead = torch.gt(logprobs, chosen, out=torch.empty_like(logprobs)).sum(-1).int()
    count = max(num_tops, default=0)
    top = top_candidates(logprobs, count) if count else None
    return entries_of(token_ids, num_tops, chosen[:, 0].tolist(), ahead.tolist(), top)


def entries_of(
    token_ids: Sequence[int], num_tops: Sequence[int], chosen: Sequence[float], ahead: Sequence[int], top: Candidates | None
) -> list[TokenLogprobs]:
    """One for each token: its logprob, and how many tokens are likelier."""
    entries = []
    for row, (token_id, logprob, num_ahead) in enumerate(zip(token_ids, chosen, ahead, strict=True)):
        pairs: tuple[tuple[int, float], ...] = ()
        if top is not None:
            shown = slice(num_tops[row])
            scores = (max(score, LOWEST_LOGPROB) for score in top.scores[row, shown].tolist())
            pairs = tuple(zip(top.token_ids[row, shown].tolist(), scores, strict=True))
        entries.append(TokenLogprobs(token_id, max(logprob, LOWEST_LOGPROB), num_ahead + 1, pairs))
    return entries


@dataclass(frozen=True, slots=True)
class LaunchedScores:
    """What score_tokens gives, for tokens that the host does not know yet: launched, and to be fetched with them."""

    tensors: list[Tensor]
    num_tops: list[int]

    @classmethod
    def of(cls, logprobs: Tensor, token_ids: Tensor, num_tops: list[int]) -> LaunchedScores:
        """Shapes: logprobs [N, V] float32; token_ids [N] int64, one out of range standing for any."""
        chosen = logprobs.gather(-1, token_ids.clamp(0, logprobs.shape[-1] - 1)[:, None])
        count = max(num_tops, default=0)
        tops = [top_keys(logprobs, count)] if count else []
        return cls([chosen[:, 0], (logprobs > chosen).sum(-1), *tops], num_tops)

    def entries(self, token_ids: Sequence[int], fetched: Sequence[NDArray[Any]]) -> list[TokenLogprobs]:
        """fetched: the tensors on the host."""
        chosen, ahead, *keys = fetched
        top = candidates_of_keys(keys[0]) if keys else None
        return entries_of(token_ids, self.num_tops, chosen.tolist(), ahead.tolist(), top)


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Score the prompt's own tokens: row r of logits [R, V] float32 against the token that follows it."""
    if not next_token_ids:
        return ()
    logprobs = torch.log_softmax(logits, dim=-1)
    return tuple(score_tokens(logprobs, next_token_ids, [num_top] * len(next_token_ids)))
