"""Locally typical sampling: keep the tokens whose surprise is nearest to what the distribution makes one expect.

Source: Meister et al. 2023, Locally Typical Sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted


class TypicalTokens:
    """A logits processor, and the last: it looks at what the others have left, at the request's temperature.

    Without effect on greedy requests.  At least one token is kept; the other truncations then choose among those that are.
    """

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def admit(self, admitted: Admitted) -> None:
        params = admitted.sampling_params
        if params.typical_p < 1.0 and not params.is_greedy:
            self._params[admitted.seq_id] = params

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        is_changed = False
        for row, seq_id in enumerate(seq_ids):
            params = self._params.get(seq_id)
            if params is not None:
                scores = logits[row].cpu().numpy()
                if np.isfinite(scores.max()):
                    left_out = torch.from_numpy(~typical(scores, params.temperature, params.typical_p))
                    logits[row] = logits[row].masked_fill(left_out.to(logits.device), -torch.inf)
                    is_changed = True
        return is_changed

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._params

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """What was said changes nothing here."""

    def retire(self, seq_id: int) -> None:
        self._params.pop(seq_id, None)


def typical(scores: NDArray[np.float32], temperature: float, mass: float) -> NDArray[np.bool_]:
    """Which tokens are kept: scores [V] with a finite maximum; the most typical first, lower ids among equals, up to the mass."""
    shifted = (scores.astype(np.float64) - scores.max()) / temperature
    logprobs = shifted - np.log(np.exp(shifted).sum())
    probabilities = np.exp(logprobs)
    has_any = probabilities > 0
    entropy = -(probabilities[has_any] * logprobs[has_any]).sum()
    by_distance = np.argsort(np.abs(-logprobs - entropy), kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(probabilities[by_distance]), mass)) + 1
    is_kept = np.zeros(len(scores), np.bool_)
    is_kept[by_distance[:num_kept]] = True
    return is_kept
