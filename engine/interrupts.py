"""Ctrl-C while an engine computes in the caller's own thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupts:
    """Interrupts that wait until somebody asks for them; a second one, of who is tired of waiting, does not."""

    def __init__(self) -> None:
        self._usual = signal.getsignal(signal.SIGINT)
        self._waiting: tuple[int, FrameType | None] | None = None

    def hold(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._waiting = number, frame
        else:
            self.let_through()

    def let_through(self) -> None:
        """Do what an interrupt that waits would have done, which usually raises KeyboardInterrupt."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and callable(self._usual):
            self._usual(*waiting)


@contextmanager
def held_interrupts() -> Iterator[HeldInterrupts]:
    """Interrupts wait for `let_through` or the end: raised in the middle of a step they would leave blocks to nobody.

    Without effect in other threads than the main one, which get none, and where they are ignored or end the process.
    """
    held = HeldInterrupts()
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield held
        return
    signal.signal(signal.SIGINT, held.hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, usual)
    held.let_through()
