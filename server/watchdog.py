"""Reports a step that does not end, with the stacks of all threads: what a stuck process can still say about itself."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)


class Watchdog:
    """A thread of its own, so that it also sees an event loop that hangs.  One report per stall.

    Where even this thread can't run, since native code holds the interpreter, faulthandler's timer writes the stacks.
    """

    def __init__(self, engine: AsyncLLMEngine, limit_s: float):
        self._engine = engine
        self._limit_s = limit_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_told = False

    def start(self) -> None:
        """Nothing if there is no limit."""
        if self._limit_s > 0:
            self._thread = threading.Thread(target=self._watch, name="pagestream-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        between_s = min(1.0, self._limit_s / 4)
        timer = FrozenTimer(self._limit_s + 2 * between_s)
        while not self._is_over.wait(between_s):
            timer.arm()
            self._look()
        timer.cancel()

    def _look(self) -> None:
        stalled_s = self._engine.stalled_s
        if stalled_s <= self._limit_s:
            self._has_told = False
        elif not self._has_told:
            self._has_told = True
            log.error("no step has ended for %.1f s; the stacks of all threads:\n%s", stalled_s, stacks())


class FrozenTimer:
    """Writes all stacks to standard error unless it is armed again in time.  Nothing where there is no real standard error."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        try:
            self._fd = sys.__stderr__.fileno() if sys.__stderr__ is not None else -1
        except (OSError, ValueError):
            self._fd = -1

    def arm(self) -> None:
        if self._fd >= 0:
            faulthandler.dump_traceback_later(self._limit_s, file=self._fd)

    def cancel(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def stacks() -> str:
    """Where each thread stands.  Code only, no values: they would hold prompts and keys."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
