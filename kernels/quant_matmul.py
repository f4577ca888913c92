"""Linear with 4-bit or 8-bit weights and few rows: y = x W^T, w = scale * code + minimum, one scale and minimum per group.

Shapes:  x [T, K]; W [N, K] stored as [K / 64, N, 32] bytes (4 bit) or [K / 64, N, 64] (8 bit), so that what a program reads in
         one step lies in one piece; scales and minimums [K / group, N], group 32, 64 or 128.
         Byte j of a 4-bit piece holds elements j (low) and j + 32 (high): each half is a tile of its own, nothing is interleaved.
Floor:   N K / 2 bytes (4 bit) or N K (8 bit), and 2 N K / group scales and minimums of 16 bit: 0.53 and 1.03 bytes a weight at
         group 128.  2 T N K FLOPs: the bytes decide up to about 50 rows.
How:     Codes become floats by putting them into the low digits of a constant, 128 in bfloat16 and 1024 in float16; the constant,
         and the minimum, come out again as a multiple of the row's sum.  So a group costs one multiplication of its sum instead
         of one of each weight.  K is cut into splits that depend on the shape alone; the last arriver adds them up in order.
Source:  llama.cpp's Q4_1 for the format; Kim et al. 2022, Who Says Elephants Can't Run, for the digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagestream.kernels.attention_tile import dot

ROWS, COLS = 16, 128
PIECE = 64  # elements of K in one piece
MAX_ROWS = 1024
MIN_PROGRAMS = 256  # aimed at by splitting K
MIN_PIECES = 8  # of a split


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A linear's weight, packed once; made by `pack`."""

    pieces: Tensor  # [K / 64, N, 32 or 64] uint8
    scales: Tensor  # [K / group, N]
    minimums: Tensor  # [K / group, N]
    arrivals: Tensor  # [MAX_ROWS / ROWS, N / COLS] int32, zero between launches
    bits: int
    group: int

    @property
    def num_splits(self) -> int:
        num_pieces, num_outputs, _ = self.pieces.shape
        wanted = triton.cdiv(MIN_PROGRAMS, triton.cdiv(num_outputs, COLS))
        return max(1, min(wanted, num_pieces // MIN_PIECES))


def pack(codes: Tensor, scales: Tensor, minimums: Tensor, *, bits: int, group: int) -> QuantisedWeight:
    """codes [N, K] uint8, below 16 for 4 bits; scales, minimums [N, K / group].

    Raises ValueError on sizes or formats that the kernel has not.
    """
    num_outputs, num_inputs = codes.shape
    if bits not in (4, 8) or group not in (32, 64, 128) or num_inputs % max(PIECE, group):
        raise ValueError(f"{bits} bits in groups of {group} over {num_inputs} elements are not supported")
    pieces = codes.view(num_outputs, num_inputs // PIECE, PIECE).transpose(0, 1)
    if bits == 4:
        pieces = pieces[..., :32] | pieces[..., 32:] << 4
    arrivals = torch.zeros(MAX_ROWS // ROWS, triton.cdiv(num_outputs, COLS), dtype=torch.int32, device=codes.device)
    return QuantisedWeight(pieces.contiguous(), scales.t().contiguous(), minimums.t().contiguous(), arrivals, bits, group)


def unpack(weight: QuantisedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """The weight as floats, [N, K], or some of its rows; in plain torch, for whoever multiplies many rows with it."""
    pieces = weight.pieces if rows is None else weight.pieces[:, rows]
    codes = torch.cat((pieces & 15, pieces >> 4), dim=-1) if weight.bits == 4 else pieces
    num_pieces, num_rows, _ = codes.shape
    grouped = codes.transpose(0, 1).reshape(num_rows, num_pieces * PIECE // weight.group, weight.group).to(torch.float32)
    scales, minimums = (
        (part if rows is None else part[:, rows]).t()[..., None].float() for part in (weight.scales, weight.minimums)
    )
    return torch.addcmul(minimums, grouped, scales).to(dtype).flatten(1)


@triton.jit
def _digits(codes, kind: tl.constexpr):
    """Codes of 8 bit at most as floats; in float16 1024 too large."""
    if kind == tl.float16:
        floats = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        floats = codes.to(tl.float32).to(kind)
    return floats


@triton.jit
def _nibbles(codes, kind: tl.constexpr):
    """As _digits, for codes below 16, which fit into the digits of bfloat16 too: there they come out 128 too large."""
    if kind == tl.bfloat16:
        floats = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        floats = _digits(codes, kind)
    return floats


@triton.jit(do_not_specialize=["num_rows"])
def _quant_matmul_kernel(
    x_ptr, pieces_ptr, scales_ptr, minimums_ptr, y_ptr, partials_ptr, arrivals_ptr, num_rows,
    X_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    BYTES: tl.constexpr = 8 * BITS
    RUN: tl.constexpr = 32 if BITS == 4 else 64
    STEP: tl.constexpr = 64 if GROUP < 64 else GROUP
    NUM_STEPS: tl.constexpr = K // STEP
    OFFSET: tl.constexpr = 1024.0 if kind == tl.float16 else (128.0 if kind == tl.bfloat16 and BITS == 4 else 0.0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(2)
    row_mask = rows < num_rows
    col_mask = cols < N
    run = tl.arange(0, RUN)
    x_base = x_ptr + rows.to(tl.int64)[:, None] * X_STRIDE + run[None, :]
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for step in tl.range(NUM_STEPS * split // SPLITS, NUM_STEPS * (split + 1) // SPLITS):
        group_dot = tl.zeros([ROWS, COLS], tl.float32)
        group_sum = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(STEP // 64):
            piece = step * (STEP // 64) + part
            at = pieces_ptr + piece.to(tl.int64) * (N * BYTES) + cols[:, None] * BYTES
            x_low = tl.load(x_base + piece * 64, mask=row_mask[:, None], other=0.0)
            if BITS == 4:
                words = tl.load(at + run[None, :], mask=col_mask[:, None], other=0)
                x_high = tl.load(x_base + piece * 64 + 32, mask=row_mask[:, None], other=0.0)
                low_dot = dot(x_low, tl.trans(_nibbles(words & 15, kind)), UPCAST)
                high_dot = dot(x_high, tl.trans(_nibbles(words >> 4, kind)), UPCAST)
                low_sum = tl.sum(x_low.to(tl.float32), axis=1)
                high_sum = tl.sum(x_high.to(tl.float32), axis=1)
                if GROUP == 32:
                    low_at = (2 * piece) * N + cols
                    scale = tl.load(scales_ptr + low_at, mask=col_mask, other=0.0).to(tl.float32)
                    minimum = tl.load(minimums_ptr + low_at, mask=col_mask, other=0.0).to(tl.float32) - OFFSET * scale
                    sums += low_dot * scale[None, :] + low_sum[:, None] * minimum[None, :]
                    scale = tl.load(scales_ptr + low_at + N, mask=col_mask, other=0.0).to(tl.float32)
                    minimum = tl.load(minimums_ptr + low_at + N, mask=col_mask, other=0.0).to(tl.float32) - OFFSET * scale
                    sums += high_dot * scale[None, :] + high_sum[:, None] * minimum[None, :]
                else:
                    group_dot += low_dot + high_dot
                    group_sum += low_sum + high_sum
            else:
                if GROUP == 32:
                    # Two groups to a piece: the codes' scales differ within the tile, so they go onto the weights.
                    group_of = (2 * piece + run // 32)[None, :] * N + cols[:, None]
                    words = tl.load(at + run[None, :], mask=col_mask[:, None], other=0).to(tl.float32)
                    scale = tl.load(scales_ptr + group_of, mask=col_mask[:, None], other=0.0).to(tl.float32)
                    minimum = tl.load(minimums_ptr + group_of, mask=col_mask[:, None], other=0.0).to(tl.float32)
                    sums += dot(x_low, tl.trans((words * scale + minimum).to(kind)), UPCAST)
                else:
                    words = tl.load(at + run[None, :], mask=col_mask[:, None], other=0)
                    group_dot += dot(x_low, tl.trans(_digits(words, kind)), UPCAST)
                    group_sum += tl.sum(x_low.to(tl.float32), axis=1)
        if GROUP > 32:
            scale = tl.load(scales_ptr + step * N + cols, mask=col_mask, other=0.0).to(tl.float32)
            minimum = tl.load(minimums_ptr + step * N + cols, mask=col_mask, other=0.0).to(tl.float32) - OFFSET * scale
            sums += group_dot * scale[None, :] + group_sum[:, None] * minimum[None, :]

    mask = row_mask[:, None] & col_mask[None, :]
    target = rows.to(tl.int64)[:, None] * N + cols[None, :]
    if SPLITS == 1:
        tl.store(y_ptr + target, sums.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partials_ptr + split.to(tl.int64) * num_rows * N + target, sums, mask=mask)
        # All threads' stores before the one thread's arrival.
        tl.debug_barrier()
        arrival = arrivals_ptr + tl.program_id(1) * tl.cdiv(N, COLS) + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrival, 0)
            total = tl.zeros([ROWS, COLS], tl.float32)
            for other in range(SPLITS):
                stored = partials_ptr + tl.full([], other, tl.int64) * num_rows * N + target
                total += tl.load(stored, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=mask)


def quant_matmul(x: Tensor, weight: QuantisedWeight, *, upcast: bool = False) -> Tensor:
    """x times the transposed weight.

    Shapes:  x [T, K] with contiguous rows, T <= 1024.  Returns [T, N], dtype of x.
    Numbers: codes times x exactly, sums in float32, the sums of the splits in order; a row depends on itself alone.  Launches that share a weight must follow one another on one stream.
    Raises:  ValueError on shapes that do not fit.
    upcast:  multiply in float32; the interpreter needs it for bfloat16.
    Oracle:  kernels.reference.quant_matmul
    """
    num_rows, num_inputs = x.shape
    num_pieces, num_outputs, _ = weight.pieces.shape
    if num_inputs != num_pieces * PIECE or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()} does not fit a weight of {num_pieces * PIECE} inputs")
    if num_rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, not {num_rows}")
    y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    splits = weight.num_splits
    partials = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device) if splits > 1 else weight.arrivals
    _quant_matmul_kernel[(triton.cdiv(num_outputs, COLS), triton.cdiv(num_rows, ROWS), splits)](
        x, weight.pieces, weight.scales, weight.minimums, y, partials, weight.arrivals, num_rows,
        X_STRIDE=x.stride(0), N=num_outputs, K=num_inputs, GROUP=weight.group, BITS=weight.bits, SPLITS=splits,
        ROWS=ROWS, COLS=COLS, UPCAST=upcast, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y
