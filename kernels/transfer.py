"""Between host and device: many small arrays in one copy each way, from and to pinned memory, and one wait a step.

A copy from pageable memory makes the host wait for all that was launched before it; one from pinned memory is only queued.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes, of every array's place: kernels read them in pieces of that size

Array = NDArray[Any]


class HostLink(Protocol):
    """How a step's arrays reach the device, and its results the host."""

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The same numbers on the device; does not wait for it."""

    def refill(self, target: Tensor, arrays: Sequence[Array]) -> None:
        """Put the numbers into bytes on the device, num_bytes(arrays) of them, where `views` finds them; does not wait for it."""

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        """The same numbers on the host.  Waits for all that was launched before: once a step is enough."""

    def wait(self) -> None:
        """Until all that was launched is done; for whoever takes times."""


class SharedMemory:
    """A HostLink where the device is the host: nothing is copied but into a given place; arrays must be left alone afterwards."""

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def refill(self, target: Tensor, arrays: Sequence[Array]) -> None:
        write(target, arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [tensor.numpy() for tensor in tensors]

    def wait(self) -> None:
        """Nothing is ever under way."""


class PinnedLink:
    """A HostLink to a GPU.  Pinned buffers come from torch's own cache, which gives none out while a copy of it is under way."""

    def __init__(self, device: torch.device, *, pinned: bool = True):
        self._device = device
        self._pinned = pinned

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        target = torch.empty(num_bytes(arrays), dtype=torch.uint8, device=self._device)
        self.refill(target, arrays)
        return views(target, arrays)

    def refill(self, target: Tensor, arrays: Sequence[Array]) -> None:
        staging = torch.empty(num_bytes(arrays), dtype=torch.uint8, pin_memory=self._pinned)
        write(staging, arrays)
        target.copy_(staging, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        targets = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned) for tensor in tensors]
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        self.wait()
        return [target.numpy() for target in targets]

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def places(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins in one buffer, and at the end how large that is."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + math.ceil(array.nbytes / ALIGNMENT) * ALIGNMENT)
    return starts


def num_bytes(arrays: Sequence[Array]) -> int:
    return places(arrays)[-1]


def write(buffer: Tensor, arrays: Sequence[Array]) -> None:
    """Put the arrays into bytes on the host."""
    bytes_ = buffer.numpy()
    for array, start in zip(arrays, places(arrays), strict=False):
        bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(buffer: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """The tensors that lie where `write` has put those arrays."""
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, places(arrays), strict=False)
    ]
