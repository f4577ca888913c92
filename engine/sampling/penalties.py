"""Repetition, frequency and presence penalties.

Source: Keskar et al. 2019, CTRL, for repetition (prompt and output); OpenAI's API reference for the other two (output only).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.sampling.changes import StepChanges

MAX_REPETITION_PENALTY = 1e37  # and its inverse: what float32 can still divide and multiply by without a NaN


class TokenCounts:
    """The different tokens of one sequence, and how often each was said; grows by doubling.

    Tokens of the prompt are there with a count of 0.
    """

    __slots__ = ("_counts", "_ids", "_index_of", "params")

    def __init__(self, params: SamplingParams):
        self.params = params
        self._index_of: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, np.float32)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._index_of)]

    def add(self, token_ids: Iterable[int], times: int) -> None:
        for token_id in token_ids:
            index = self._index_of.setdefault(token_id, len(self._index_of))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._counts[index] += times


class Penalties:
    """A logits processor.  For a token t that was said c times, in this order:

    logit(t) is divided by the repetition penalty if positive and multiplied by it if not, also if t is in the prompt only;
    frequency_penalty * c and, if c > 0, presence_penalty are subtracted.
    """

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def admit(self, admitted: Admitted) -> None:
        params = admitted.sampling_params
        if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return
        counts = self._counts[admitted.seq_id] = TokenCounts(params)
        if params.repetition_penalty != 1.0:
            counts.add(admitted.prompt_token_ids, 0)
        counts.add(admitted.output_token_ids, 1)

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        found = [(row, self._counts[seq_id]) for row, seq_id in enumerate(seq_ids) if seq_id in self._counts]
        if not any(len(counts.token_ids) for _, counts in found):
            return False
        lengths = [len(counts.token_ids) for _, counts in found]

        def spread(values: Sequence[float], dtype: type) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype), lengths)).to(logits.device)

        # One flat list of (row, token) pairs, each of them once, for all rows together.
        rows = spread([row for row, _ in found], np.int64)
        token_ids = torch.from_numpy(np.concatenate([counts.token_ids for _, counts in found])).to(logits.device)
        times = torch.from_numpy(np.concatenate([counts.counts for _, counts in found])).to(logits.device)
        repetition = spread([bounded(counts.params.repetition_penalty) for _, counts in found], np.float32)
        frequency = spread([counts.params.frequency_penalty for _, counts in found], np.float32)
        presence = spread([counts.params.presence_penalty for _, counts in found], np.float32)
        scores = logits[rows, token_ids]
        scores = torch.where(scores > 0, (scores / repetition).clamp(max=torch.finfo(scores.dtype).max), scores * repetition)
        scores -= frequency * times
        scores -= torch.where(times > 0, presence, 0.0)
        logits[rows, token_ids] = scores
        return True

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        for row, seq_id in enumerate(seq_ids):
            counts = self._counts.get(seq_id)
            if counts is not None and len(counts.token_ids):
                changes.of(row).said_ids, changes.of(row).said_counts = counts.token_ids, counts.counts

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._counts

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if seq_id in self._counts:
            self._counts[seq_id].add(token_ids, 1)

    def retire(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)


def bounded(repetition_penalty: float) -> float:
    return min(max(repetition_penalty, 1 / MAX_REPETITION_PENALTY), MAX_REPETITION_PENALTY)
