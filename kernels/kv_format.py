"""The layout of the pages: what lies where inside one block and KV head.

A page tensor is [B, G, K, D] in float32, float16 or bfloat16.  The 8-bit formats keep one float32 scale per token and head,
so their tensors are [B, G, K, D + 4]: of the K * (D + 4) bytes of a block and head the first K * D are the codes, token by
token, and the last 4 * K the scales.  Scales so travel with their block through every copy and swap, and both parts start
at multiples of 16 bytes because K is a multiple of 16 and D of 4.

A value is code * scale, scale = amax / max_code; integer codes are stored plus 128.  Unlike one scale per tensor, this needs no
calibration and cannot saturate.  The CPU operators keep the sizes and the rule, in an order of their own (kernels/cpu/codes.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_BYTES = 4


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in MAX_CODE


def page_width(head_size: int, dtype: torch.dtype) -> int:
    """The last size of a page tensor, in elements."""
    return head_size + SCALE_BYTES if is_quantised(dtype) else head_size


def head_size_of(cache: Tensor) -> int:
    return cache.shape[3] - SCALE_BYTES if is_quantised(cache.dtype) else cache.shape[3]


def scales_view(cache: Tensor) -> Tensor:
    """All bytes of an 8-bit page tensor as float32; the scale of token j of a block and head is element K * D / 4 + j of it.

    For a cache that is not quantised: the cache itself, which kernels then do not read as scales.
    """
    return cache.view(torch.float32).flatten(2) if is_quantised(cache.dtype) else cache


def page_format(cache: Tensor) -> int:
    """As the kernels number them: 0 plain, 1 fp8, 2 int8."""
    return {torch.float8_e4m3fn: 1, torch.int8: 2}.get(cache.dtype, 0)


def page_words(cache: Tensor) -> Tensor:
    """What attention reads: the pages, those of 8 bit as 16-bit words of two codes."""
    return cache.view(torch.int16) if is_quantised(cache.dtype) else cache


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, the nearest, as they are stored (uint8), and float32 scales: one per row of the last axis; NaN where x is not finite."""
    x = x.float()
    scales = x.abs().amax(-1).clamp_min(1e-30) / MAX_CODE[dtype]
    codes = (x / scales[..., None]).clamp(-MAX_CODE[dtype], MAX_CODE[dtype])
    stored = ((codes + 0.5).floor() + 128).to(torch.uint8) if dtype == torch.int8 else codes.to(dtype).view(torch.uint8)
    return stored, scales


def write_rows(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write x [T, G, D] into the slots [T] of a quantised page tensor, in plain torch."""
    num_heads, block_size, size = cache.shape[1], cache.shape[2], head_size_of(cache)
    codes, scales = quantise(x, cache.dtype)
    blocks = torch.div(slots, block_size, rounding_mode="floor")[:, None]
    offsets, heads = (slots % block_size)[:, None], torch.arange(num_heads, device=slots.device)[None]
    elements = offsets * size + torch.arange(size, device=slots.device)
    cache.view(torch.uint8).flatten(2)[blocks[..., None], heads[..., None], elements[:, None]] = codes
    scales_view(cache)[blocks, heads, block_size * size // 4 + offsets] = scales


def read_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """What some blocks of a quantised page tensor hold: [blocks, G, K, D] float32, in plain torch."""
    block_size, size = cache.shape[2], head_size_of(cache)
    pieces = cache.view(torch.uint8)[blocks].flatten(2)
    stored = pieces[:, :, : block_size * size].unflatten(2, (block_size, size))
    codes = stored.float() - 128 if cache.dtype == torch.int8 else stored.contiguous().view(cache.dtype).float()
    return codes * scales_view(cache)[blocks][:, :, block_size * size // 4 :, None]


def allocate_pages(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Pages of zeros, [B, G, K, D] or the 8-bit layout."""
    return torch.zeros(num_blocks, num_kv_heads, block_size, page_width(head_size, dtype), dtype=dtype, device=device)


def check_pages(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ValueError unless both are contiguous page tensors of one shape and dtype."""
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype or k_cache.dim() != 4:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} {k_cache.dtype} and v_cache {tuple(v_cache.shape)} {v_cache.dtype} differ"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("pages must be contiguous")
    if k_cache.shape[2] % 16:
        raise ValueError(f"the block size must be a multiple of 16, not {k_cache.shape[2]}")
