"""Faults on demand, inside one request's own computation: for this engine's tests and for users' chaos tests.

Only built with `--enable-fault-injection`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from pagestream.engine.core.request import Fault
from pagestream.engine.core.step_plan import Admitted, ScheduledSequence


class InjectedFault(RuntimeError):
    """The error that was asked for."""


class FaultInjector:
    """Remembers the marked sequences.  A fault shows whenever its sequence stands at its token, so also when a step is run again."""

    def __init__(self) -> None:
        self._marked: dict[int, tuple[Fault, int]] = {}  # seq_id -> the fault, and the length at which it shows

    def admit(self, admitted: Admitted) -> None:
        if admitted.fault is not None:
            self._marked[admitted.seq_id] = (admitted.fault, len(admitted.prompt_token_ids) + admitted.fault.at_token)

    def retire(self, seq_id: int) -> None:
        self._marked.pop(seq_id, None)

    def strike(self, stage: str, rows: Sequence[ScheduledSequence]) -> None:
        """Raises or sleeps where one of these rows is to fail at this stage."""
        for row in rows if self._marked else ():
            fault = self._due(row, stage)
            if fault is None:
                continue
            if fault.kind in ("hang", "slow"):
                time.sleep(fault.seconds)
            elif fault.kind == "oom":
                raise MemoryError("injected: out of memory")
            elif fault.kind == "raise":
                raise InjectedFault(f"injected in {stage}")

    def spoil(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
        """Write NaN over the logits [R, V] of those rows that are to have them."""
        for index, row in enumerate(rows if self._marked else ()):
            fault = self._due(row, None)
            if fault is not None and fault.kind == "nan":
                logits[index] = float("nan")

    def _due(self, row: ScheduledSequence, stage: str | None) -> Fault | None:
        fault, length = self._marked.get(row.seq_id, (None, 0))
        if fault is None or row.start + len(row.token_ids) != length or stage not in (None, fault.stage):
            return None
        return fault
