"""What lies between the QKV linear and attention, in one launch: QK-norm, rotary, and K and V into their slots.

Shapes:  q [T, H, D], k and v [T, G, D], usually three slices of one [T, (H + 2 G) D] row; pages as in kernels.kv_format.
Floor:   reads q, k, v and writes q, K, V: (4 H + 8 G) D bytes per token in 16 bit (24.6 KB at 32 and 8 heads of 128), about
         6 FLOPs per element; the bytes decide, and below about 128 tokens the launch.
Source:  Su et al. 2021, RoFormer, in the half-split layout: dimension i turns with dimension i + R / 2 of R rotary dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagestream.kernels.kv_format import MAX_CODE, check_pages, head_size_of, is_quantised, scales_view


@triton.jit
def _norm(
    a,
    b,
    c,
    weight_ptr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """RMSNorm of heads given as first half, second half and unrotated rest; rounded as kernels.rms_norm does."""
    half = tl.arange(0, HALF_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    scale = tl.rsqrt(squares / D + EPS)[:, None]
    kind = weight_ptr.dtype.element_ty
    a = (a * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    b = (b * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[
        None, :
    ]
    c_weight = tl.load(weight_ptr + 2 * HALF + rest, mask=rest < D - 2 * HALF, other=0.0).to(tl.float32)
    c = (c * scale).to(kind).to(tl.float32) * c_weight[None, :]
    return a.to(kind).to(tl.float32), b.to(kind).to(tl.float32), c.to(kind).to(tl.float32)


@triton.jit
def _load_heads(
    row_ptr,
    heads,
    num_heads: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    half = tl.arange(0, HALF_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    half_mask = (heads < num_heads)[:, None] & (half < HALF)[None, :]
    rest_mask = (heads < num_heads)[:, None] & (rest < D - 2 * HALF)[None, :]
    base = row_ptr + heads[:, None] * D
    a = tl.load(base + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    b = tl.load(base + HALF + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    c = tl.load(base + 2 * HALF + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    return a, b, c, base, half_mask, rest_mask


@triton.jit
def _cast(x, page_ptr, scale, QUANTISED: tl.constexpr, INTEGER: tl.constexpr, MAX: tl.constexpr):
    if QUANTISED:
        # Clamped because float32 to float8 conversions differ in what they do beyond the range.
        x = tl.minimum(tl.maximum(x / scale, -MAX), MAX)
        if INTEGER:
            x = (tl.floor(x + 0.5) + 128.0).to(tl.int32)
    return x.to(page_ptr.dtype.element_ty)


@triton.jit
def _write_page(
    a, b, c, page_ptr, scale_ptr, slot, head, half_mask, rest_mask,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr, INTEGER: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """One head ([1, …] tiles) into its slot."""
    WIDTH: tl.constexpr = D + 4 if QUANTISED else D
    block_head = (slot // K) * G + head
    offset = slot % K
    scale = 1.0
    if QUANTISED:
        amax = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        amax = tl.max(tl.maximum(amax, tl.max(tl.abs(c), axis=1)), axis=0)
        scale = tl.maximum(amax, 1e-30) / MAX
        tl.store(scale_ptr + block_head * (K * WIDTH // 4) + K * D // 4 + offset, scale)
    base = page_ptr + block_head * (K * WIDTH) + offset * D
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.arange(0, REST_BLOCK)[None, :]
    tl.store(base + half, _cast(a, page_ptr, scale, QUANTISED, INTEGER, MAX), mask=half_mask)
    tl.store(base + HALF + half, _cast(b, page_ptr, scale, QUANTISED, INTEGER, MAX), mask=half_mask)
    tl.store(base + 2 * HALF + rest, _cast(c, page_ptr, scale, QUANTISED, INTEGER, MAX), mask=rest_mask)


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"])
def _reshape_and_cache_kernel(
    q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr,
    slots_ptr, positions_ptr, table_ptr, q_norm_ptr, k_norm_ptr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    QUANTISED: tl.constexpr, INTEGER: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    GROUP: tl.constexpr = H // G
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(GROUP)
    HALF_BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    REST_BLOCK: tl.constexpr = triton.next_power_of_2(D - 2 * HALF) if D > 2 * HALF else 1
    slot = tl.load(slots_ptr + token)
    one = tl.arange(0, 1)

    k_a, k_b, k_c, _, k_half_mask, k_rest_mask = _load_heads(
        k_ptr + token * tl.multiple_of(k_stride, 8) + head * D, one, 1, D, HALF, HALF_BLOCK, REST_BLOCK
    )
    if NORM:
        k_a, k_b, k_c = _norm(k_a, k_b, k_c, k_norm_ptr, EPS, D, HALF, HALF_BLOCK, REST_BLOCK)
    if ROTARY or NORM:
        heads = tl.arange(0, GROUP_BLOCK)
        q_a, q_b, q_c, q_base, q_half_mask, q_rest_mask = _load_heads(
            q_ptr + token * tl.multiple_of(q_stride, 8) + head * GROUP * D, heads, GROUP, D, HALF, HALF_BLOCK, REST_BLOCK
        )
        if NORM:
            q_a, q_b, q_c = _norm(q_a, q_b, q_c, q_norm_ptr, EPS, D, HALF, HALF_BLOCK, REST_BLOCK)
        half = tl.arange(0, HALF_BLOCK)
        rest = tl.arange(0, REST_BLOCK)
        if ROTARY:
            row_ptr = table_ptr + tl.load(positions_ptr + token) * 2 * HALF
            cos = tl.load(row_ptr + half, mask=half < HALF, other=0.0)[None, :]
            sin = tl.load(row_ptr + HALF + half, mask=half < HALF, other=0.0)[None, :]
            q_a, q_b = q_a * cos - q_b * sin, q_b * cos + q_a * sin
            k_a, k_b = k_a * cos - k_b * sin, k_b * cos + k_a * sin
        tl.store(q_base + half[None, :], q_a, mask=q_half_mask)
        tl.store(q_base + HALF + half[None, :], q_b, mask=q_half_mask)
        if NORM:
            tl.store(q_base + 2 * HALF + rest[None, :], q_c, mask=q_rest_mask)
    if slot >= 0:
        v_a, v_b, v_c, _, v_half_mask, v_rest_mask = _load_heads(
            v_ptr + token * tl.multiple_of(v_stride, 8) + head * D, one, 1, D, HALF, HALF_BLOCK, REST_BLOCK
        )
        _write_page(
            k_a, k_b, k_c, k_cache_ptr, k_scale_ptr, slot, head, k_half_mask, k_rest_mask,
            G, K, D, HALF, HALF_BLOCK, REST_BLOCK, QUANTISED, INTEGER, MAX,
        )  # fmt: skip
        _write_page(
            v_a, v_b, v_c, v_cache_ptr, v_scale_ptr, slot, head, v_half_mask, v_rest_mask,
            G, K, D, HALF, HALF_BLOCK, REST_BLOCK, QUANTISED, INTEGER, MAX,
        )  # fmt: skip


def rotary_table(inv_freq: Tensor, max_positions: int, attention_factor: float = 1.0) -> Tensor:
    """cos and sin of every position: [max_positions, R] float32, the R / 2 cosines before the R / 2 sines."""
    angles = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor


def reshape_and_cache(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *,
    positions: Tensor | None = None, table: Tensor | None = None,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
) -> None:  # fmt: skip
    """Norm and rotate q and k where asked, q in place, and write K and V into their slots.

    Shapes:  q [T, H, D], k, v [T, G, D], each head contiguous and heads one after another; slots [T] int64, -1: padding that
             writes nothing; positions [T] int64 and table [P, R] from rotary_table: rotary; q_norm, k_norm [D]: RMSNorm of each
             head before it.  8-bit pages get one scale per token and head.
    Numbers: in float32, rounded once after rotary; k itself is left as it was.
    Raises:  ValueError on shapes or strides that do not fit.
    Oracle:  kernels.reference.reshape_and_cache
    """
    check_pages(k_cache, v_cache)
    (num_tokens, num_heads, head_size), num_kv_heads = q.shape, k.shape[1]
    if head_size_of(k_cache) != head_size or k_cache.shape[1] != num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit pages {tuple(k_cache.shape)}")
    if any(x.stride(2) != 1 or x.stride(1) != head_size or x.stride(0) % 8 for x in (q, k, v)):
        raise ValueError("the heads of a token must lie one after another, and tokens a multiple of 8 elements apart")
    if (table is None) != (positions is None) or (q_norm is None) != (k_norm is None):
        raise ValueError("table and positions, q_norm and k_norm go together")
    if table is not None and table.shape[1] > head_size:
        raise ValueError(f"{table.shape[1]} rotary dimensions do not fit heads of {head_size}")
    # Without rotary the split is free: the largest power of two in the head needs no masks.
    half = table.shape[1] // 2 if table is not None else 1 << (head_size.bit_length() - 2)
    if num_tokens:
        _reshape_and_cache_kernel[(num_tokens, num_kv_heads)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), k_cache, v_cache, scales_view(k_cache), scales_view(v_cache), slots,
            slots if positions is None else positions, slots if table is None else table,
            q if q_norm is None else q_norm, k if k_norm is None else k_norm,
            H=num_heads, G=num_kv_heads, K=k_cache.shape[2], D=head_size, HALF=half,
            ROTARY=table is not None, NORM=q_norm is not None, EPS=eps,
            QUANTISED=is_quantised(k_cache.dtype), INTEGER=k_cache.dtype == torch.int8, MAX=MAX_CODE.get(k_cache.dtype, 1.0),
            num_warps=1,
        )  # fmt: skip
