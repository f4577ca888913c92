"""All rows' tokens by the sampling kernel: temperature, truncation, draw and check in two launches and one wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import NOT_FINITE, ScheduledSequence
from pagestream.engine.sampling.choosing import NO_TOKEN, Choice, StepChooser
from pagestream.kernels.sampling import NUM_FLOATS, NUM_INTS, Sampled, SamplingTable, sample
from pagestream.kernels.transfer import Array, HostLink

SEEDS = 1 << 64


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
    """The columns `floats` and `ints` of the kernel's SamplingTable."""
    floats = np.zeros((len(draws), NUM_FLOATS), np.float32)
    ints = np.zeros((len(draws), NUM_INTS), np.int64)
    for index, draw in enumerate(draws):
        params = draw.params
        floats[index, :4] = (0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p, 1.0)
        # Modulo 2^64, as a signed number: the kernel reads the bits.
        seed = (draw.seed + SEEDS // 2) % SEEDS - SEEDS // 2
        ints[index, :5] = (max(params.top_k, 0), seed, draw.position, -1, -1)
    return [floats, ints]


class TableParts:
    """What the kernel's table holds besides a step's own two columns: biases, penalties and masks, of which there are none.

    The logits processors have applied theirs before.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device):
        words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._words = words
        self._bias_start = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._bias_tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._bias_values = torch.zeros(1, device=device)

    def table(self, floats: Tensor, ints: Tensor) -> SamplingTable:
        return SamplingTable(
            floats=floats,
            ints=ints,
            counts=self._counts,
            prompt_bits=self._words,
            bias_start=self._bias_start,
            bias_tokens=self._bias_tokens,
            bias_values=self._bias_values,
            masks=self._words,
        )


class KernelChooser:
    """A Chooser.  Everything is launched first; the host then waits once, for tokens and checks together."""

    def __init__(self, link: HostLink, vocab_size: int, max_rows: int, device: torch.device):
        """max_rows: samples of one step at most."""
        self._link = link
        self.parts = TableParts(vocab_size, max_rows, device)

    def begin(self, logits: Tensor) -> StepChooser:
        tops = logits.amax(-1)  # NaN where the row holds one, whatever is ruled out later

        def choose(
            logits: Tensor, rows: Sequence[ScheduledSequence], params: Sequence[SamplingParams], *, are_changed: bool
        ) -> Choice:
            draws = draws_of(rows, params)
            places = [draw.row for draw in draws]
            arrays = table_arrays(draws)
            if places != list(range(len(rows))):
                floats, ints, at = self._link.upload([*arrays, np.array(places, np.int64)])
                logits = logits.index_select(0, at)
            else:
                floats, ints = self._link.upload(arrays)
            sampled = sample(logits, self.parts.table(floats, ints))
            token_ids, highest = self._link.fetch([sampled.tokens, tops])
            return collect(draws, rows, token_ids, np.isfinite(highest))

        return choose

    def read(self, sampled: Sampled, draws: Sequence[KernelDraw], rows: Sequence[ScheduledSequence]) -> Choice:
        """What a launch by somebody else gave, one draw a row and nothing changed: its rows may be more than the draws."""
        token_ids, log_sums = self._link.fetch([sampled.tokens, sampled.log_sum_exp])
        return collect(draws, rows, token_ids, np.isfinite(log_sums[: len(rows)]))


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
