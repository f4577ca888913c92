"""The tensors of the paged cache: how many blocks fit, and copies of whole blocks within and between the pools."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagestream.engine.attention.base import LayerCache
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.step_plan import BlockCopy
from pagestream.kernels.kv_format import page_width

MADV_POPULATE_WRITE = 23  # Linux 5.14
POPULATED_AT_ONCE = 4 << 20  # bytes of one layer's keys: two of the system's largest usual pages


class BlockMover(Protocol):
    """Copies whole blocks between two pools; no target is another copy's source."""

    def __call__(self, source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None: ...


class KVCache:
    """Pages of all layers in one tensor per pool, [L, 2, B, G, K, W]: a block is one index of the third axis, everywhere.

    W is the head size, in 8-bit formats with the scales behind it (kernels.kv_format).  Zeroed at birth, so that no slot ever
    holds a NaN that nobody wrote.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        block_size: int,
        num_blocks: int,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        mover: BlockMover | None = None,
    ):
        """mover: None copies by plain torch."""

        def sizes(count: int) -> tuple[int, ...]:
            return shape.num_layers, 2, count, shape.num_kv_heads, block_size, page_width(shape.head_size, dtype)

        is_gpu = device.type == "cuda"
        self._move = mover or move
        self._pages = torch.zeros(sizes(num_blocks), dtype=dtype, device=device) if is_gpu else lazy_zeros(sizes(num_blocks), dtype)
        if is_gpu and num_swap_blocks:
            self._swapped = torch.zeros(sizes(num_swap_blocks), dtype=dtype, pin_memory=True)
        else:
            self._swapped = lazy_zeros(sizes(num_swap_blocks), dtype)
        self.layers = [LayerCache(k=layer[0], v=layer[1]) for layer in self._pages]

    def populate(self, is_unwanted: Callable[[], bool] = lambda: False) -> None:
        """Have the system back the pages with memory, the lowest blocks of all layers first; on a GPU they are.

        May run beside steps.  Ends early, within milliseconds, once `is_unwanted` says so.
        """
        if self._pages.device.type != "cpu":
            return
        num_blocks = self._pages.shape[2]
        at_once = max(1, POPULATED_AT_ONCE // max(1, self._pages[0, 0, :1].nbytes))
        for first in range(0, num_blocks, at_once):
            for layer in self.layers:
                for pages in (layer.k, layer.v):
                    if is_unwanted() or not populate(pages[first : first + at_once]):
                        return

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Device block to device block, all at once: no target is another copy's source."""
        if copies:
            self._move(self._pages, self._pages, copies)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._move(self._pages, self._swapped, copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._move(self._swapped, self._pages, copies)


def populate(pages: Tensor) -> bool:
    """Back contiguous memory as writing to it would; False where the system can't be asked to."""
    start, end = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE, (pages.data_ptr() + pages.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "linux":
        return False
    advise = ctypes.CDLL(None).madvise  # ctypes lets go of the interpreter meanwhile
    return start >= end or advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE) == 0


def lazy_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written; torch.zeros writes them all, and so does calloc in memory once freed.

    Raises StartError where the system has not even the addresses, as under a limit of a process's memory.
    """
    num_bytes = math.prod(sizes) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(sizes, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        size = f"{num_bytes / 2**30:.2f} GiB"
        raise StartError(f"no {size} for the KV cache: {error.strerror}; a smaller kv_cache_memory or swap_space needs less") from error
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a wish: small pages serve too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes)


def move(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    sources = torch.tensor([copy.source for copy in copies], device=source.device)
    targets = torch.tensor([copy.target for copy in copies], device=target.device)
    if source.dtype.itemsize == 1:  # not every operator of torch knows float8
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.index_copy_(2, targets, source.index_select(2, sources).to(target.device))


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * block_size * page_width(shape.head_size, dtype) * dtype.itemsize
