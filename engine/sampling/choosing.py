"""Who chooses the tokens of a step: the host's own draw, or one kernel for all rows.

Both give a row a token that depends on its own logits, parameters, seed and position alone.  Greedy rows get the same token from
either; a drawn one may differ between them, for they turn the seed into random numbers in ways of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import NOT_FINITE, ScheduledSequence, TokenLogprobs
from pagestream.engine.sampling.changes import StepChanges
from pagestream.engine.sampling.drawing import Draw, draw_tokens, select
from pagestream.engine.sampling.logprobs import score_tokens
from pagestream.engine.sampling.randomness import uniform

NO_TOKEN = "the request's parameters leave no token to choose"


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one step: a row is in `failed`, or each of its samples in `token_ids`; rows of beam search only ever fail."""

    token_ids: dict[tuple[int, int], int] = field(default_factory=dict)  # (row's index, sample's seq_id) -> token id, in that order
    failed: dict[int, str] = field(default_factory=dict)  # by the row's seq_id
    scores: dict[tuple[int, int], TokenLogprobs] = field(default_factory=dict)  # of the tokens of rows whose logprobs are wanted


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row whose tokens' logprobs are wanted, of so many likeliest ones besides."""

    row: int
    num_top: int


class StepChooser(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[ScheduledSequence],
        params: Sequence[SamplingParams],
        changes: StepChanges,
        *,
        are_changed: bool,
    ) -> Choice:
        """Choose from the logits as they are now, with these changes; are_changed: they are no longer what the model gave.

        May change them.
        """


class Chooser(Protocol):
    applies_changes: bool  # else there are none for it

    def begin(self, logits: Tensor, scored: Sequence[ScoredRow], *, will_change: bool) -> StepChooser:
        """Look at what the model gave, before anything changes it, which nothing does unless `will_change`.

        logits [R, V] float32, contiguous.
        """


class HostChooser:
    """The inverse of the cumulative distribution at one number of each row, computed on the host."""

    applies_changes = False

    def begin(self, logits: Tensor, scored: Sequence[ScoredRow], *, will_change: bool) -> StepChooser:
        best = find_best(logits)
        logprobs = torch.log_softmax(select(logits, [one.row for one in scored]), dim=-1) if scored else None

        def choose(
            logits: Tensor,
            rows: Sequence[ScheduledSequence],
            params: Sequence[SamplingParams],
            changes: StepChanges,
            *,
            are_changed: bool,
        ) -> Choice:
            failed = {rows[index].seq_id: NOT_FINITE for index in best.not_finite}
            now = best
            if are_changed:
                now = find_best(logits)
                for index in now.not_finite:
                    failed.setdefault(rows[index].seq_id, NO_TOKEN)
            chosen = self._tokens(logits, now.token_ids, rows, params, failed)
            return Choice(chosen, failed, {} if logprobs is None else scores_of(chosen, logprobs, scored))

        return choose

    def _tokens(
        self,
        logits: Tensor,
        greedy_ids: Sequence[int],
        rows: Sequence[ScheduledSequence],
        params: Sequence[SamplingParams],
        failed: dict[int, str],
    ) -> dict[tuple[int, int], int]:
        chosen: dict[tuple[int, int], int] = {}
        random_rows: list[int] = []
        draws: list[Draw] = []
        for index, row in enumerate(rows):
            if row.seq_id in failed or params[index].use_beam_search:
                continue
            for sample in row.samples:
                chosen[index, sample.seq_id] = greedy_ids[index]
            if not params[index].is_greedy:
                position = row.start + len(row.token_ids)
                draws += [Draw(len(random_rows), uniform(sample.seed, position)) for sample in row.samples]
                random_rows.append(index)
        if draws:
            keys = [(index, sample.seq_id) for index in random_rows for sample in rows[index].samples]
            drawn = draw_tokens(select(logits, random_rows), [params[index] for index in random_rows], draws)
            chosen.update(zip(keys, drawn, strict=True))
        return chosen


def scores_of(
    chosen: dict[tuple[int, int], int], logprobs: Tensor, scored: Sequence[ScoredRow]
) -> dict[tuple[int, int], TokenLogprobs]:
    """Of the chosen tokens of the scored rows; logprobs [len(scored), V]."""
    keys = list(chosen)
    wanted = wanted_draws([row for row, _ in keys], scored)
    if not wanted.draws:
        return {}
    wanted_keys = [keys[index] for index in wanted.draws]
    by_sample = logprobs if wanted.is_straight(len(scored)) else logprobs[wanted.places]
    return dict(zip(wanted_keys, score_tokens(by_sample, [chosen[key] for key in wanted_keys], wanted.num_tops), strict=True))


class WantedDraws(NamedTuple):
    """Draws whose logprobs are wanted, in their order: parallel lists."""

    draws: list[int]  # which they are
    places: list[int]  # of their rows among the scored ones
    num_tops: list[int]

    def is_straight(self, num_scored: int) -> bool:
        """Whether they are one for each scored row, in that order."""
        return self.places == list(range(num_scored))


def wanted_draws(rows: Sequence[int], scored: Sequence[ScoredRow]) -> WantedDraws:
    """rows: of each draw."""
    place_of = {one.row: place for place, one in enumerate(scored)}
    draws = [index for index, row in enumerate(rows) if row in place_of]
    places = [place_of[rows[index]] for index in draws]
    return WantedDraws(draws, places, [scored[place].num_top for place in places])


@dataclass(frozen=True, slots=True)
class Best:
    token_ids: list[int]  # of each row's maximum; the lowest of equals
    not_finite: list[int]  # rows whose maximum is NaN or infinite


def choose_best(best: Best, rows: Sequence[ScheduledSequence]) -> Choice:
    """For rows that are all greedy and have one sample each."""
    failed = {rows[index].seq_id: NOT_FINITE for index in best.not_finite}
    chosen = {(index, row.samples[0].seq_id): best.token_ids[index] for index, row in enumerate(rows) if row.seq_id not in failed}
    return Choice(chosen, failed)


def find_best(logits: Tensor) -> Best:
    """One pass serves greedy rows and the check of all rows at once: the maximum of a row with a NaN is NaN."""
    if logits.device.type == "cpu":
        scores = logits.numpy()  # its argmax takes a third of the time of torch's max
        token_ids = scores.argmax(-1)
        is_fine = np.isfinite(scores[np.arange(len(scores)), token_ids])
        return Best(token_ids.tolist(), np.flatnonzero(~is_fine).tolist())
    best = logits.max(-1)
    return Best(best.indices.tolist(), [index for index, is_fine in enumerate(best.values.isfinite().tolist()) if not is_fine])
