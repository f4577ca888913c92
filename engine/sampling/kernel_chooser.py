"""All rows' tokens by the sampling kernel: changes of single logits, truncation, draw and check in two launches and one wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import NOT_FINITE, ScheduledSequence
from pagestream.engine.sampling.changes import RowChanges, StepChanges
from pagestream.engine.sampling.choosing import NO_TOKEN, Choice, ScoredRow, StepChooser, wanted_draws
from pagestream.engine.sampling.logprobs import LaunchedScores
from pagestream.engine.sampling.penalties import bounded
from pagestream.kernels.sampling import ENTRY, NUM_FLOATS, NUM_INTS, Sampled, SamplingTable, sample
from pagestream.kernels.transfer import Array, HostLink

SEEDS = 1 << 64
NO_MASK_BELOW = 4  # words: a place of 0 says that there is none


@dataclass(slots=True)  # not frozen, which would take twice as long to make: each row of each step makes one
class KernelDraw:
    """One row of the kernel's table: a sample of a row of the logits."""

    row: int
    seq_id: int
    params: SamplingParams
    seed: int
    position: int


def draws_of(rows: Sequence[ScheduledSequence], params: Sequence[SamplingParams]) -> list[KernelDraw]:
    """Every sample of every row; one of a beam, whose own sample only says whether its logits are numbers."""
    return [
        KernelDraw(index, sample.seq_id, one, sample.seed, row.start + len(row.token_ids))
        for index, (row, one) in enumerate(zip(rows, params, strict=True))
        for sample in (row.samples[:1] if one.use_beam_search else row.samples)
    ]


def table_arrays(draws: Sequence[KernelDraw]) -> list[Array]:
    """The columns `floats` and `ints` of the kernel's SamplingTable, of rows that nobody changes."""
    floats = np.zeros((len(draws), NUM_FLOATS), np.float32)
    ints = np.zeros((len(draws), NUM_INTS), np.int64)
    for index, draw in enumerate(draws):
        params = draw.params
        floats[index, :3] = (0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p)
        # Modulo 2^64, as a signed number: the kernel reads the bits.
        seed = (draw.seed + SEEDS // 2) % SEEDS - SEEDS // 2
        ints[index, :3] = (max(params.top_k, 0), seed, draw.position)
    return [floats, ints]


def list_changes(arrays: Sequence[Array], draws: Sequence[KernelDraw], changes: StepChanges, mask_words: int) -> Array:
    """The column `words`, with the draws' places in it entered into the other two; mask_words: of a mask of all tokens."""
    floats, ints = arrays
    parts: list[Array] = [np.zeros(NO_MASK_BELOW, np.int32)]
    places: dict[int, list[int]] = {}
    at = NO_MASK_BELOW
    for row, change in changes.rows.items():
        here = [0]
        if change.masks:
            here = [at]
            parts.append(common(change.masks, mask_words))
            at += mask_words
        for entries in entries_of(change):
            here.append(at)
            parts.append(entries.reshape(-1))
            at += entries.size
        places[row] = [*here, at]
    for index, draw in enumerate(draws):
        if draw.row in places:
            ints[index, NUM_INTS - 5 :] = places[draw.row]
            params = draw.params
            floats[index, 3:6] = bounded(params.repetition_penalty), params.frequency_penalty, params.presence_penalty
    return np.concatenate(parts)


def common(masks: Sequence[Array], num_words: int) -> Array:
    """What all masks allow, in so many words."""
    both = np.full(num_words, -1, np.int32)
    for mask in masks:
        part = mask[:num_words]
        both[: len(part)] &= part
        both[len(part) :] = 0
    return both


def entries_of(change: RowChanges) -> Iterator[Array]:
    """The three lists as the kernel reads them, [N, 2] int32 each: token ids and the bits of floats."""
    ruled_out = np.concatenate(change.ruled_out) if change.ruled_out else None
    for token_ids, values in ((change.bias_ids, change.biases), (change.said_ids, change.said_counts), (ruled_out, None)):
        entries = np.zeros((0 if token_ids is None else len(token_ids), ENTRY), np.int32)
        if token_ids is not None:
            entries[:, 0] = token_ids
        if values is not None:
            entries[:, 1] = values.view(np.int32)
        yield entries


class KernelChooser:
    """A Chooser.  Everything is launched first; the host then waits once, for tokens, checks and logprobs together."""

    applies_changes = True

    def __init__(self, link: HostLink, vocab_size: int, device: torch.device):
        self._link = link
        self._mask_words = -(-vocab_size // 32)
        self._no_words = torch.zeros(NO_MASK_BELOW, dtype=torch.int32, device=device)

    def plain_table(self, floats: Tensor, ints: Tensor) -> SamplingTable:
        """Of rows that nobody changes."""
        return SamplingTable(floats, ints, self._no_words)

    def begin(self, logits: Tensor, scored: Sequence[ScoredRow], *, will_change: bool) -> StepChooser:
        tops = logits.amax(-1) if will_change else None  # NaN where the row holds one, whatever is ruled out later
        logprobs = self._logprobs(logits, scored)

        def choose(
            logits: Tensor,
            rows: Sequence[ScheduledSequence],
            params: Sequence[SamplingParams],
            changes: StepChanges,
            *,
            are_changed: bool,
        ) -> Choice:
            draws = draws_of(rows, params)
            places = [draw.row for draw in draws]
            arrays = table_arrays(draws)
            if changes.rows:
                arrays.append(list_changes(arrays, draws, changes, self._mask_words))
            is_straight = places == list(range(len(rows)))
            if not is_straight:
                arrays.append(np.array(places, np.int64))
            floats, ints, *others = self._link.upload(arrays)
            words = others[0] if changes.rows else self._no_words
            sampled = sample(logits if is_straight else logits.index_select(0, others[-1]), SamplingTable(floats, ints, words))
            return self._fetch(sampled, draws, rows, logprobs, scored, tops)

        return choose

    def read(
        self, logits: Tensor, sampled: Sampled, draws: Sequence[KernelDraw], rows: Sequence[ScheduledSequence], scored: Sequence[ScoredRow]
    ) -> Choice:
        """What a launch by somebody else gave, one draw a row and nothing changed: its rows may be more than the draws."""
        return self._fetch(sampled, draws, rows, self._logprobs(logits, scored), scored, None)

    def _logprobs(self, logits: Tensor, scored: Sequence[ScoredRow]) -> Tensor | None:
        """[len(scored), V]"""
        if not scored:
            return None
        if len(scored) < logits.shape[0]:
            (at,) = self._link.upload([np.array([one.row for one in scored], np.int64)])
            logits = logits.index_select(0, at)
        return torch.log_softmax(logits, dim=-1)

    def _fetch(
        self,
        sampled: Sampled,
        draws: Sequence[KernelDraw],
        rows: Sequence[ScheduledSequence],
        logprobs: Tensor | None,
        scored: Sequence[ScoredRow],
        tops: Tensor | None,
    ) -> Choice:
        """tops: of each row's own logits, where the draws saw others; the one wait of the step."""
        wanted = wanted_draws([draw.row for draw in draws], scored)
        launched = None
        if logprobs is not None and wanted.draws:
            of_draws, at = self._link.upload([np.array(wanted.places, np.int64), np.array(wanted.draws, np.int64)])
            if not wanted.is_straight(len(scored)):
                logprobs = logprobs.index_select(0, of_draws)
            launched = LaunchedScores.of(logprobs, sampled.tokens.index_select(0, at), wanted.num_tops)
        fetched = self._link.fetch([
            sampled.tokens,
            sampled.log_sum_exp if tops is None else tops,
            *(launched.tensors if launched is not None else ()),
        ])
        token_ids, sums = fetched[:2]
        is_finite = np.isfinite(sums)
        if tops is None:
            by_draw, is_finite = is_finite, np.ones(len(rows), np.bool_)
            is_finite[[draw.row for draw in draws]] = by_draw[: len(draws)]
        choice = collect(draws, rows, token_ids, is_finite)
        if launched is not None:
            chosen = token_ids[wanted.draws].tolist()
            for index, entry in zip(wanted.draws, launched.entries(chosen, fetched[2:]), strict=True):
                choice.scores[draws[index].row, draws[index].seq_id] = entry
        return choice


def collect(draws: Sequence[KernelDraw], rows: Sequence[ScheduledSequence], token_ids: Array, is_finite: Array) -> Choice:
    """token_ids: one per draw at least; is_finite: of each row's own logits."""
    choice = Choice()
    for index, row in enumerate(rows):
        if not is_finite[index]:
            choice.failed[row.seq_id] = NOT_FINITE
    for draw, token_id in zip(draws, token_ids.tolist(), strict=False):
        seq_id = rows[draw.row].seq_id
        if seq_id in choice.failed:
            continue
        if token_id < 0:
            choice.failed[seq_id] = NO_TOKEN
        elif not draw.params.use_beam_search:
            choice.token_ids[draw.row, draw.seq_id] = token_id
    return choice
