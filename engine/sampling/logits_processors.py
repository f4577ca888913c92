"""What changes the scores before a token is chosen: the protocol, and the parts that need no counting.

A processor keeps its state by sequence and looks at its own sequences only; with none of them in the step it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.sampling.changes import StepChanges, as_bits


class LogitsProcessor(Protocol):
    """Called by the sampler, which sees to it that a sequence is admitted once and each of its output tokens observed once."""

    def admit(self, admitted: Admitted) -> None:
        """Take note of a sequence and the output tokens it comes with."""

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        """Change logits [R, V] float32 in place, row r for sequence seq_ids[r]; returns whether anything was changed.

        A row's change must not depend on the other rows.
        """

    def concerns(self, seq_id: int) -> bool:
        """Whether `apply` could change that sequence's row now; False for one that is unknown.

        What does not concern a sequence at its admission never will, and is not told its tokens.
        """

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these output tokens."""

    def retire(self, seq_id: int) -> None:
        """Forget the sequence; it may never have been admitted."""


class LogitBias:
    """Adds a constant to chosen tokens' logits."""

    def __init__(self) -> None:
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}  # token ids, each once, and what to add to each

    def admit(self, admitted: Admitted) -> None:
        biases = dict(admitted.sampling_params.logit_bias)
        if biases:
            self._biases[admitted.seq_id] = (np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32))

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        is_changed = False
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._biases:
                token_ids, biases = self._biases[seq_id]
                logits[row, torch.from_numpy(token_ids).to(logits.device)] += torch.from_numpy(biases).to(logits.device)
                is_changed = True
        return is_changed

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._biases:
                changes.of(row).bias_ids, changes.of(row).biases = self._biases[seq_id]

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._biases

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """What was said changes nothing here."""

    def retire(self, seq_id: int) -> None:
        self._biases.pop(seq_id, None)


class MinTokens:
    """Rules out all tokens that would end a sequence, until it has its least number of tokens."""

    def __init__(self, eos_token_ids: frozenset[int]):
        self._eos_token_ids = eos_token_ids
        self._ending_ids: dict[int, NDArray[np.int64]] = {}
        self._num_lacking: dict[int, int] = {}

    def admit(self, admitted: Admitted) -> None:
        params = admitted.sampling_params
        ending = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if params.min_tokens > len(admitted.output_token_ids) and ending:
            self._ending_ids[admitted.seq_id] = np.array(sorted(ending), np.int64)
            self._num_lacking[admitted.seq_id] = params.min_tokens - len(admitted.output_token_ids)

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        is_changed = False
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._ending_ids:
                logits[row, torch.from_numpy(self._ending_ids[seq_id]).to(logits.device)] = -torch.inf
                is_changed = True
        return is_changed

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._ending_ids:
                changes.of(row).ruled_out.append(self._ending_ids[seq_id])

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._ending_ids

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if seq_id in self._num_lacking:
            self._num_lacking[seq_id] -= len(token_ids)
            if self._num_lacking[seq_id] <= 0:
                self.retire(seq_id)

    def retire(self, seq_id: int) -> None:
        self._ending_ids.pop(seq_id, None)
        self._num_lacking.pop(seq_id, None)


class AllowedTokens:
    """Rules out all tokens but those that the request allows."""

    def __init__(self) -> None:
        self._allowed: dict[int, Tensor] = {}
        self._bits: dict[int, NDArray[np.int32]] = {}  # the same as masks

    def admit(self, admitted: Admitted) -> None:
        allowed = admitted.sampling_params.allowed_token_ids
        if allowed is not None:
            self._allowed[admitted.seq_id] = torch.tensor(sorted(set(allowed)))
            self._bits[admitted.seq_id] = as_bits(allowed)

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        is_changed = False
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._allowed:
                allowed = self._allowed[seq_id].to(logits.device)
                kept = logits[row, allowed]
                logits[row] = -torch.inf
                logits[row, allowed] = kept
                is_changed = True
        return is_changed

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        for row, seq_id in enumerate(seq_ids):
            if seq_id in self._bits:
                changes.of(row).masks.append(self._bits[seq_id])

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._allowed

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """What was said changes nothing here."""

    def retire(self, seq_id: int) -> None:
        self._allowed.pop(seq_id, None)
        self._bits.pop(seq_id, None)
