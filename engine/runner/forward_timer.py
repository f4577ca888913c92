"""How long a forward pass took, also where the host only queues it."""

from __future__ import annotations

import time

import torch


class ForwardTimer:
    """From its making to `stop`, by the device's own clock: on a GPU two marks in its queue, which nobody waits for."""

    def __init__(self, device: torch.device):
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._marks = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._marks[0].record()
        self._start_s = self._end_s = time.perf_counter()

    def stop(self) -> None:
        if self._marks is not None:
            self._marks[1].record()
        self._end_s = time.perf_counter()

    def seconds(self) -> float:
        """Asked after the step's results have reached the host; a step without any is told as the host has seen it."""
        if self._marks is not None and self._marks[1].query():
            return self._marks[0].elapsed_time(self._marks[1]) / 1000
        return self._end_s - self._start_s
