"""The tensors of the paged cache: how many blocks fit, and copies of whole blocks within and between the pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.attention.base import LayerCache
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.step_plan import BlockCopy


class KVCache:
    """Pages of all layers in one tensor per pool, [L, 2, B, G, K, D]: a block is one index of the third axis, everywhere.

    Zeroed at birth, so that no slot ever holds a NaN that nobody wrote.
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
    ):
        def sizes(count: int) -> tuple[int, ...]:
            return shape.num_layers, 2, count, shape.num_kv_heads, block_size, shape.head_size

        is_gpu = device.type == "cuda"
        self._pages = torch.zeros(sizes(num_blocks), dtype=dtype, device=device) if is_gpu else lazy_zeros(sizes(num_blocks), dtype)
        if is_gpu and num_swap_blocks:
            self._swapped = torch.zeros(sizes(num_swap_blocks), dtype=dtype, pin_memory=True)
        else:
            self._swapped = lazy_zeros(sizes(num_swap_blocks), dtype)
        self.layers = [LayerCache(k=layer[0], v=layer[1]) for layer in self._pages]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Device block to device block, all at once: no target is another copy's source."""
        move(self._pages, self._pages, copies)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        move(self._pages, self._swapped, copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        move(self._swapped, self._pages, copies)


def lazy_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written; torch.zeros writes them all."""
    as_integers = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(math.prod(sizes), as_integers)).view(dtype).view(sizes)


def move(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    if not copies:
        return
    sources = torch.tensor([copy.source for copy in copies], device=source.device)
    targets = torch.tensor([copy.target for copy in copies], device=target.device)
    target.index_copy_(2, targets, source.index_select(2, sources).to(target.device))


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * block_size * shape.head_size * dtype.itemsize
