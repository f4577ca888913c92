"""Words that an answer must not hold: the token that would complete one is ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.sampling.changes import StepChanges


@dataclass(slots=True)
class Watched:
    """The words of one sequence as token ids, and as many of its last tokens as the longest of them needs."""

    words: tuple[tuple[int, ...], ...]
    tail: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int]) -> None:
        keep = max(map(len, self.words)) - 1
        tail = [*self.tail, *token_ids]
        self.tail = tail[len(tail) - keep :] if keep else []

    def ruled_out(self) -> list[int]:
        """The last tokens of those words of which all the others have just been said."""
        return [
            word[-1] for word in self.words if len(word) - 1 <= len(self.tail) and tuple(self.tail[len(self.tail) - len(word) + 1 :]) == word[:-1]
        ]


class BadWords:
    """A logits processor.  A word counts in the tokens that the tokenizer makes of it, with and without a space before it."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}

    def admit(self, admitted: Admitted) -> None:
        words = admitted.sampling_params.bad_word_ids
        if words:
            watched = self._watched[admitted.seq_id] = Watched(words)
            watched.add(admitted.output_token_ids)

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        is_changed = False
        for row, seq_id in enumerate(seq_ids):
            ruled_out = self._watched[seq_id].ruled_out() if seq_id in self._watched else []
            if ruled_out:
                logits[row, torch.tensor(ruled_out, device=logits.device)] = -torch.inf
                is_changed = True
        return is_changed

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        for row, seq_id in enumerate(seq_ids):
            ruled_out = self._watched[seq_id].ruled_out() if seq_id in self._watched else []
            if ruled_out:
                changes.of(row).ruled_out.append(np.array(ruled_out, np.int64))

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._watched

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if seq_id in self._watched:
            self._watched[seq_id].add(token_ids)

    def retire(self, seq_id: int) -> None:
        self._watched.pop(seq_id, None)
