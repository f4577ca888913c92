"""The logits processor: what would leave the language gets -inf, before a token is chosen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.features.structured.compiler import ConstraintCompiler
from pagestream.engine.sampling.changes import StepChanges

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

# A mask takes some 70 us; fewer of them are done before a pool of threads has woken.
MASKS_WORTH_THREADS = 16

# Of eight tokens each, lowest bit first: no limit where the bit is set.
LIMITS_OF_BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf).astype(np.float32)


class ConstraintMask:
    """Invariant: a sequence's matcher has consumed exactly its output tokens, so a step can be repeated and a mask recomputed.

    Where the language is complete, only the end of sequence is left.  A row whose matcher has failed (a limit of the library was
    exceeded) gets no token at all, which the sampler tells as that request's own failure.
    """

    def __init__(self, compiler: ConstraintCompiler):
        self._compiler = compiler
        self._matchers: dict[int, LLMatcher] = {}
        self._executor: LLExecutor | None = None

    def admit(self, admitted: Admitted) -> None:
        constraint = admitted.sampling_params.constraint
        if constraint is not None:
            self._matchers[admitted.seq_id] = self._compiler.matcher(constraint)
            self.observe(admitted.seq_id, admitted.output_token_ids)

    def apply(self, logits: Tensor, seq_ids: Sequence[int]) -> bool:
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._matchers]
        if not rows:
            return False
        bits = self._bitmasks([self._matchers[seq_ids[row]] for row in rows])
        rule_out = rule_out_on_host if logits.device.type == "cpu" else rule_out_on_device
        rule_out(logits, rows, bits)
        return True

    def list_changes(self, seq_ids: Sequence[int], changes: StepChanges) -> None:
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._matchers]
        if rows:
            for row, bits in zip(rows, self._bitmasks([self._matchers[seq_ids[row]] for row in rows]), strict=True):
                changes.of(row).masks.append(bits)

    def concerns(self, seq_id: int) -> bool:
        return seq_id in self._matchers

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        matcher = self._matchers.get(seq_id)
        if matcher is not None and token_ids and not matcher.consume_tokens(list(token_ids)):
            logger.error("sequence %d has left its constraint: %s", seq_id, matcher.get_error())

    def retire(self, seq_id: int) -> None:
        self._matchers.pop(seq_id, None)

    def _bitmasks(self, matchers: Sequence[LLMatcher]) -> NDArray[np.int32]:
        """[len(matchers), ceil(V / 32)] int32, one bit per token; all zero for a matcher that has failed."""
        bits = np.zeros((len(matchers), -(-self._compiler.vocab_size // 32)), np.int32)
        if len(matchers) < MASKS_WORTH_THREADS:
            for matcher, row in zip(matchers, bits, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(numbered, bits.ctypes.data, bits.shape[1] * 4, len(matchers))
        for index, matcher in enumerate(matchers):
            if matcher.is_error():
                logger.error("a constraint can't be followed any further: %s", matcher.get_error())
                bits[index] = 0
        return bits


def rule_out_on_host(logits: Tensor, rows: Sequence[int], bits: NDArray[np.int32]) -> None:
    """Write -inf wherever a row's bit is 0: logits [R, V] float32 on the CPU, bits [len(rows), ceil(V / 32)]."""
    scores, masks = logits.numpy(), bits.view(np.uint8)
    limits = np.empty((masks.shape[1], 8), np.float32)
    for row, mask in zip(rows, masks, strict=True):
        # A minimum with plus or minus infinity takes a fifth of a masked copy's time where allowed tokens are scattered.
        np.take(LIMITS_OF_BYTES, mask, axis=0, out=limits, mode="clip")
        np.minimum(scores[row], limits.reshape(-1)[: logits.shape[-1]], out=scores[row])


def rule_out_on_device(logits: Tensor, rows: Sequence[int], bits: NDArray[np.int32]) -> None:
    """The same for logits on any device: the packed bits travel, an eighth of a byte per token."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    packed = torch.from_numpy(bits).to(logits.device)
    is_ruled_out = ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[-1]] == 0
    at = torch.tensor(rows, device=logits.device)
    logits[at] = logits[at].masked_fill(is_ruled_out, -torch.inf)
