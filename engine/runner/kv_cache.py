"""The tensors of the paged cache: how many blocks fit, and copies of whole blocks within and between the pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.attention.base import LayerCache
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.step_plan import BlockCopy
from pagestream.kernels.kv_format import page_width


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


def lazy_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written; torch.zeros writes them all."""
    as_integers = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(math.prod(sizes), as_integers)).view(dtype).view(sizes)


def move(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    sources = torch.tensor([copy.source for copy in copies], device=source.device)
    targets = torch.tensor([copy.target for copy in copies], device=target.device)
    if source.dtype.itemsize == 1:  # not every operator of torch knows float8
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.index_copy_(2, targets, source.index_select(2, sources).to(target.device))


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * block_size * page_width(shape.head_size, dtype) * dtype.itemsize
