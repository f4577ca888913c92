"""Copy whole blocks between page tensors: copy-on-write within a pool, swaps between a pool and pinned host memory.

One launch moves a list of (source, target) block ids for all layers, K and V: the tensors are named by a table of addresses,
so neither the number of layers nor the number of pairs is part of the kernel.
Floor:   2 * pairs * tensors * block bytes over the memory's rate; over the host link (about 55 GB/s on PCIe 5 x16) one way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 2048


@triton.jit
def _copy_blocks_kernel(source_table_ptr, target_table_ptr, pairs_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    tensor = tl.program_id(1)
    source_id = tl.load(pairs_ptr + pair * 2)
    target_id = tl.load(pairs_ptr + pair * 2 + 1)
    source_ptr = tl.load(source_table_ptr + tensor).to(tl.pointer_type(tl.int32)) + source_id * WORDS
    target_ptr = tl.load(target_table_ptr + tensor).to(tl.pointer_type(tl.int32)) + target_id * WORDS
    source_ptr = tl.multiple_of(source_ptr, 16)
    target_ptr = tl.multiple_of(target_ptr, 16)
    for start in range(0, WORDS, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < WORDS
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=inside, other=0), mask=inside)


def address_table(pages: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """The addresses of page tensors of one shape and dtype, to be made once: pages never move.

    Host tensors must be pinned, so that the device can read them.  Raises ValueError on tensors that differ.
    """
    first = pages[0]
    for tensor in pages:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or not tensor.is_contiguous():
            raise ValueError("page tensors of one table must be contiguous and of one shape and dtype")
    return torch.tensor([tensor.data_ptr() for tensor in pages], dtype=torch.int64, device=device)


def copy_blocks(source_table: Tensor, target_table: Tensor, pairs: Tensor, block_bytes: int) -> None:
    """Copy block pairs[i, 0] of every source tensor onto block pairs[i, 1] of the target tensor beside it.

    Shapes:  source_table, target_table [N] int64, from address_table; pairs [P, 2] int64 on the device.
    The pairs are copied in no particular order: no block may be a target twice, or a target and a source of the same tensor.
    Raises:  ValueError if block_bytes is no multiple of 16 or the tables differ in length.
    Oracle:  kernels.reference.copy_blocks
    """
    if block_bytes % 16:
        raise ValueError(f"block_bytes must be a multiple of 16, not {block_bytes}")
    if source_table.shape != target_table.shape:
        raise ValueError("source and target tables must name as many tensors")
    if pairs.shape[0]:
        _copy_blocks_kernel[(pairs.shape[0], source_table.shape[0])](
            source_table, target_table, pairs, WORDS=block_bytes // 4, BLOCK=BLOCK_WORDS, num_warps=4
        )
