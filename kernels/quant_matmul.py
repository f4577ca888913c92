"""Linear with 4-bit or 8-bit weights and few rows: y = x W^T, w = scale * code + minimum, one scale and minimum per group.

Shapes:  x [T, K]; W [N, K] stored as [K / piece, N, 64 bytes], so that what a program reads in one step lies in one piece (32
         bytes where K is an odd multiple of 64); scales and minimums [K / group, 2, N], group 32, 64 or 128.
         A 32-bit word holds two elements that are neighbours in each of its fields: the words of a piece, their halves aside,
         are one run of consecutive elements per field.  Field j of half h of word i is element 32 j + 2 i + h.
Floor:   N K / 2 bytes (4 bit) or N K (8 bit), and 2 N K / group scales and minimums of 16 bit: 0.53 and 1.03 bytes a weight at
         group 128.  2 T N K FLOPs: the bytes decide up to about 50 rows.
How:     The weights are the matrix unit's left side, which takes two neighbours in one register: one shift and one mask make
         both of a field, by putting the codes into the low digits of a constant, 128 in bfloat16 and 1024 in float16.  The
         constant, and the minimum, come out again as a multiple of the row's sum, which a product with ones gives.  So a group
         costs one multiplication of its sum instead of one of each weight.  K is cut into splits that depend on the shape
         alone; the last arriver adds them up in order.
Source:  llama.cpp's Q4_1 for the format; Kim et al. 2022, Who Says Elephants Can't Run, for the digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from pagestream.kernels.attention_tile import dot
from pagestream.kernels.word_pairs import in_pairs

ROWS, COLS = 16, 128
UNPACKED_ROWS = 64
PIECE = 64  # K is a multiple of so many elements
PIECE_BYTES = 64  # codes of one output in one step, or half as many: see `pack`
MAX_ROWS = 1024
MIN_PROGRAMS = 512  # aimed at by splitting K
MIN_SPLIT = 512  # elements of K


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A linear's weight, packed once; made by `pack`."""

    pieces: Tensor  # [K / piece, N, 16 or 8] int32
    factors: Tensor  # [K / group, 2, N]: scales and minimums
    arrivals: Tensor  # [MAX_ROWS / ROWS, N / COLS] int32, zero between launches
    bits: int
    group: int

    @property
    def num_inputs(self) -> int:
        return self.factors.shape[0] * self.group

    @property
    def num_outputs(self) -> int:
        return self.factors.shape[2]

    @property
    def num_splits(self) -> int:
        wanted = triton.cdiv(MIN_PROGRAMS, triton.cdiv(self.num_outputs, COLS))
        return max(1, min(wanted, self.num_inputs // MIN_SPLIT))


def pack(codes: Tensor, scales: Tensor, minimums: Tensor, *, bits: int, group: int) -> QuantisedWeight:
    """codes [N, K] uint8, below 16 for 4 bits; scales, minimums [N, K / group].

    Raises ValueError on sizes or formats that the kernel has not.
    """
    num_outputs, num_inputs = codes.shape
    if bits not in (4, 8) or group not in (32, 64, 128) or num_inputs % max(PIECE, group):
        raise ValueError(f"{bits} bits in groups of {group} over {num_inputs} elements are not supported")
    # Half as many codes a step where K does not allow more, and where two groups of 64 at once want more registers than are there.
    is_halved = num_inputs % (PIECE_BYTES * 8 // bits) != 0 or (bits, group) == (4, 64)
    words = PIECE_BYTES // 8 if is_halved else PIECE_BYTES // 4
    # [N, pieces, bytes of a half, parts of a byte, words, halves]
    fields = codes.view(num_outputs, -1, 2, 8 // bits, words, 2)
    packed = fields[:, :, :, 0] | fields[:, :, :, 1] << 4 if bits == 4 else fields[:, :, :, 0]
    pieces = packed.permute(1, 0, 3, 4, 2).flatten(2).view(torch.int32)
    factors = torch.stack((scales.t(), minimums.t()), dim=1).contiguous()
    arrivals = torch.zeros(MAX_ROWS // ROWS, triton.cdiv(num_outputs, COLS), dtype=torch.int32, device=codes.device)
    return QuantisedWeight(pieces, factors, arrivals, bits, group)


@triton.jit(do_not_specialize=["num_outputs", "num_rows", "input_pieces"])
def _unpack_kernel(
    pieces_ptr, factors_ptr, rows_ptr, w_ptr, num_outputs, num_rows, input_pieces,
    GROUP: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    RUN: tl.constexpr = 2 * WORDS
    PIECE: tl.constexpr = (16 // BITS) * RUN
    # Sizes are no constants, so that one kernel serves all linears of a model; only as a product is their alignment known.
    num_inputs = input_pieces.to(tl.int64) * PIECE
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    source = row.to(tl.int64)
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row, mask=inside, other=0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    at = pieces_ptr + (piece * num_outputs + source)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(at, mask=inside[:, None], other=0)
    target = w_ptr + row.to(tl.int64)[:, None] * num_inputs + piece * PIECE + tl.arange(0, RUN)[None, :]
    for j in tl.static_range(16 // BITS):
        digits = (words >> (BITS * j)) & (0x000F000F if BITS == 4 else 0x00FF00FF)
        codes = tl.reshape(tl.join(digits & 0xFFFF, digits >> 16), (ROWS, RUN)).to(tl.float32)
        factor = factors_ptr + (piece * PIECE + j * RUN) // GROUP * 2 * num_outputs + source
        scale = tl.load(factor, mask=inside, other=0.0).to(tl.float32)
        minimum = tl.load(factor + num_outputs, mask=inside, other=0.0).to(tl.float32)
        w = tl.fma(codes, scale[:, None], minimum[:, None])
        tl.store(target + j * RUN, w.to(w_ptr.dtype.element_ty), mask=inside[:, None])


def unpack(weight: QuantisedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """The weight as floats, [N, K], or some of its rows, in their order; for whoever multiplies many rows with it.

    Shapes:  rows [T] int64.
    Numbers: scale * code + minimum in float32, rounded once.
    Floor:   one read of the weight and one write of 2 N K bytes, from which the product then reads them.
    """
    _, num_outputs, words = weight.pieces.shape
    num_rows = num_outputs if rows is None else rows.shape[0]
    w = torch.empty(num_rows, weight.num_inputs, dtype=dtype, device=weight.pieces.device)
    if num_rows:
        _unpack_kernel[(triton.cdiv(num_rows, UNPACKED_ROWS), weight.pieces.shape[0])](
            weight.pieces, weight.factors, rows, w, num_outputs, num_rows, weight.pieces.shape[0],
            GROUP=weight.group, BITS=weight.bits, WORDS=words, ROWS=UNPACKED_ROWS, num_warps=4,
        )  # fmt: skip
    return w


@triton.jit
def _add_product(words, x, sums, SHIFT: tl.constexpr, BITS: tl.constexpr, UPCAST: tl.constexpr):
    """sums + (codes + a constant) x, the codes being BITS bits of each 16-bit word from bit SHIFT on, x [W, ROWS]."""
    kind: tl.constexpr = x.dtype
    MASK: tl.constexpr = (1 << BITS) - 1
    if kind == tl.float32:
        sums += dot(in_pairs(words, SHIFT, MASK, 0).to(kind), x, UPCAST)
    elif kind == tl.float16:
        sums += dot(in_pairs(words, SHIFT, MASK, 0x6400).to(kind, bitcast=True), x, UPCAST)
    elif BITS == 4:
        sums += dot(in_pairs(words, SHIFT, MASK, 0x4300).to(kind, bitcast=True), x, UPCAST)
    else:
        # Only seven digits fit.  The eighth bit lies where the exponent's lowest is, which makes 256 of 128: a float of its own.
        sums += dot(in_pairs(words, SHIFT, 0x7F, 0x4300).to(kind, bitcast=True), x, UPCAST)
        sums += dot(in_pairs(words, SHIFT, 0x80, 0x4300).to(kind, bitcast=True), x, UPCAST)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _quant_matmul_kernel(
    x_ptr, pieces_ptr, factors_ptr, y_ptr, partials_ptr, arrivals_ptr, num_rows,
    X_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    # Given here, they count for scales and minimums too.  On AMD's GPUs each takes of the 64 KB that programs of a unit share.
    STAGES: tl.constexpr = 2 if is_hip() else 3
    RUN: tl.constexpr = 2 * WORDS
    DOTS: tl.constexpr = 16 // BITS
    PIECE: tl.constexpr = DOTS * RUN
    STEP: tl.constexpr = PIECE if GROUP < PIECE else GROUP
    GROUPS: tl.constexpr = STEP // GROUP
    NUM_STEPS: tl.constexpr = K // STEP
    OFFSET: tl.constexpr = 0.0 if kind == tl.float32 else (1024.0 if kind == tl.float16 else 32.0 * BITS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(2)
    row_mask = rows < num_rows
    col_mask = cols < N
    run = tl.arange(0, RUN)
    x_base = x_ptr + rows[None, :] * X_STRIDE + run[:, None]
    ones = tl.full([COLS, RUN], 1.0, tl.float32).to(kind)
    sums = tl.zeros([COLS, ROWS], tl.float32)
    for step in tl.range(NUM_STEPS * split // SPLITS, NUM_STEPS * (split + 1) // SPLITS, num_stages=STAGES):
        group_dot = tl.zeros([COLS, ROWS], tl.float32)
        group_sum = tl.zeros([COLS, ROWS], tl.float32)
        for part in tl.static_range(STEP // PIECE):
            piece = step * (STEP // PIECE) + part
            at = pieces_ptr + piece.to(tl.int64) * (N * RUN) + cols[:, None] * RUN + run[None, :]
            words = tl.load(at, mask=col_mask[:, None], other=0)
            for j in tl.static_range(DOTS):
                x = tl.load(x_base + (piece * PIECE + j * RUN), mask=row_mask[None, :], other=0.0)
                group_dot = _add_product(words, x, group_dot, BITS * j, BITS, UPCAST)
                if kind == tl.float32:
                    group_sum += tl.sum(x, axis=0)[None, :]
                else:
                    # The same for every output, of which the compiler keeps one: cheaper than adding up across threads.
                    group_sum += dot(ones, x, UPCAST)
                if (part * PIECE + (j + 1) * RUN) % GROUP == 0:
                    group = step * GROUPS + (part * PIECE + j * RUN) // GROUP
                    scale = tl.load(factors_ptr + 2 * group * N + cols, mask=col_mask, other=0.0).to(tl.float32)
                    minimum = tl.load(factors_ptr + (2 * group + 1) * N + cols, mask=col_mask, other=0.0).to(tl.float32)
                    minimum = tl.fma(scale, -OFFSET, minimum)
                    # Fused explicitly: a row's bits may not depend on what the compiler makes of it for another shape.
                    sums = tl.fma(group_dot, scale[:, None], tl.fma(group_sum, minimum[:, None], sums))
                    group_dot = tl.zeros([COLS, ROWS], tl.float32)
                    group_sum = tl.zeros([COLS, ROWS], tl.float32)

    mask = row_mask[None, :] & col_mask[:, None]
    target = rows.to(tl.int64)[None, :] * N + cols[:, None]
    if SPLITS == 1:
        tl.store(y_ptr + target, sums.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partials_ptr + split.to(tl.int64) * num_rows * N + target, sums, mask=mask)
        # All threads' stores before the one thread's arrival.
        tl.debug_barrier()
        arrival = arrivals_ptr + tl.program_id(1) * tl.cdiv(N, COLS) + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrival, 0)
            total = tl.zeros([COLS, ROWS], tl.float32)
            for other in range(SPLITS):
                stored = partials_ptr + tl.full([], other, tl.int64) * num_rows * N + target
                total += tl.load(stored, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=mask)


def quant_matmul(x: Tensor, weight: QuantisedWeight, *, upcast: bool = False) -> Tensor:
    """x times the transposed weight.

    Shapes:  x [T, K] with contiguous rows, T <= 1024.  Returns [T, N], dtype of x.
    Numbers: codes times x exactly, sums in float32, the sums of the splits in order; a row depends on itself alone.
             Launches that share a weight must follow one another on one stream.
    Raises:  ValueError on shapes that do not fit.
    upcast:  multiply in float32; the interpreter needs it for bfloat16.
    Oracle:  kernels.reference.quant_matmul
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.num_outputs
    if num_inputs != weight.num_inputs or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()} does not fit a weight of {weight.num_inputs} inputs")
    if num_rows > MAX_ROWS or num_rows * x.stride(0) >= 1 << 31:
        raise ValueError(f"at most {MAX_ROWS} rows within 2^31 elements, not {num_rows} that lie {x.stride(0)} apart")
    y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    splits = weight.num_splits
    partials = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device) if splits > 1 else weight.arrivals
    _quant_matmul_kernel[(triton.cdiv(num_outputs, COLS), triton.cdiv(num_rows, ROWS), splits)](
        x, weight.pieces.view(torch.int16), weight.factors, y, partials, weight.arrivals, num_rows,
        X_STRIDE=x.stride(0), N=num_outputs, K=num_inputs, GROUP=weight.group, BITS=weight.bits, SPLITS=splits,
        WORDS=weight.pieces.shape[2], ROWS=ROWS, COLS=COLS, UPCAST=upcast,
        # Two warps leave sm_90 and later to the older matrix unit, which takes a few rows without waiting for each product.
        num_warps=2 if x.dtype.itemsize == 2 else 8,
    )  # fmt: skip
    return y
