"""What the attention kernels share: one tile of keys and values, the online softmax, and the merge of two softmax states.

A head's D elements are handled in two parts, A = [A_SIZE] and B = [B_SIZE], each in a tile whose width is the next power of two:
- pages in 16 or 32 bit: the largest power of two, and the rest, nothing where D is a power of two.  Padding D to the next power
  instead would cost head sizes 80 and 96 a third of their instructions.
- 8-bit pages: the even and the odd elements.  Two codes are read as one 16-bit word and taken apart in registers, because the
  matrix units' transposing load knows no bytes; the queries and the output are addressed with a step of 2.

A state is (m, den, a, b): the running maximum in units of log 2, the sum of 2^(score - m), and the weighted values of both parts.

Source: Milakov & Gimelshein 2018, Online normalizer calculation for softmax; Dao et al. 2022, FlashAttention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_hip

from pagestream.kernels.word_pairs import e4m3_in_pairs, in_pairs

PLAIN, FP8, INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
# 8-bit values are summed as weight * scale * 256: scales are far below 1 and would lose digits in 16 bit.
VALUE_FACTOR = tl.constexpr(256.0)
# What `unpack` makes of a code: e4m3 comes out 2^8 too small, and an integer code c as c + 1152.
FP8_FACTOR = tl.constexpr(256.0)
INT8_OFFSET = tl.constexpr(1152.0)


def head_parts(head_size: int, is_quantised: bool) -> tuple[int, int, int]:
    """A_SIZE, A_BLOCK and B_BLOCK of a head, as the kernels take them; a matrix unit takes 16 columns at least.

    A rest of 16 took 80 % more instructions than one padded to 32.
    """
    if is_quantised:
        a_size, b_block = head_size // 2, max(16, triton.next_power_of_2(head_size // 2))
    else:
        power = triton.next_power_of_2(head_size)
        a_size = head_size if power == head_size else power // 2
        b_block = max(32, triton.next_power_of_2(head_size - a_size))
    return a_size, max(16, triton.next_power_of_2(a_size)), b_block


@triton.jit
def query_rows(
    query_block, query_first, query_len, seq_len, head, q_ptr, q_stride, M: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr
):
    """Where the rows of one tile of queries are: (query token, head of the KV head) pairs, token by token.

    Returns the sequence's token and the head of each row, which rows there are, the position of each (-1: none), the position of
    the first and one past the last, and each row's place in q from the sequence's own first row on.
    """
    BLOCK: tl.constexpr = M // PER_KV
    q_stride = tl.multiple_of(q_stride, 8)
    rows = tl.arange(0, M)
    token = query_block * BLOCK + rows // PER_KV
    live = (rows < BLOCK * PER_KV) & (token < query_len)
    heads = head * PER_KV + rows % PER_KV
    position = tl.where(live, seq_len - query_len + token, -1)
    first_position = seq_len - query_len + query_block * BLOCK
    end = first_position + tl.minimum(query_len - query_block * BLOCK, BLOCK)
    return token, heads, live, position, first_position, end, q_ptr + query_first.to(tl.int64) * q_stride, token * q_stride + heads * D


@triton.jit
def unpack(words, FORMAT: tl.constexpr):
    """The low and the high byte of each 16-bit word, as a float16.

    By bit operations alone: int-to-float conversions are slow.  An integer code (stored plus 128) becomes the low digits of a
    float16 between 1024 and 1280.  The bits of an e4m3 number moved down by one are a float16 whose exponent is 8 too small,
    subnormals included.
    """
    if FORMAT == INT8:
        low = in_pairs(words, 0, 0x00FF, 0x6400)
        high = in_pairs(words, 8, 0x00FF, 0x6400)
    else:
        low = e4m3_in_pairs(words, 8)
        high = e4m3_in_pairs(words, 0)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def dot(x, y, UPCAST: tl.constexpr):
    """All matrix products go through here: the interpreter multiplies the bits of bfloat16, so there it must be cast up first."""
    if UPCAST:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def load_queries(
    base,
    offsets,
    live,
    D: tl.constexpr,
    A_SIZE: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Both parts of the query rows, in the dtype to multiply in, and each row's sum where integer codes need it."""
    a_cols = tl.arange(0, A_BLOCK)
    b_cols = tl.arange(0, B_BLOCK)
    if FORMAT == PLAIN:
        a = tl.load(base + offsets[:, None] + a_cols[None, :], mask=live[:, None] & (a_cols < A_SIZE)[None, :], other=0.0)
        a = a.to(tl.float32).to(KIND)
        b = a
        if D > A_SIZE:
            b = tl.load(
                base + offsets[:, None] + A_SIZE + b_cols[None, :], mask=live[:, None] & (b_cols < D - A_SIZE)[None, :], other=0.0
            )
            b = b.to(tl.float32).to(KIND)
        row_sum = tl.zeros_like(offsets).to(tl.float32)
    else:
        mask = live[:, None] & (a_cols < A_SIZE)[None, :]
        a = tl.load(base + offsets[:, None] + 2 * a_cols[None, :], mask=mask, other=0.0).to(tl.float32).to(KIND)
        b = tl.load(base + offsets[:, None] + 2 * b_cols[None, :] + 1, mask=mask, other=0.0).to(tl.float32).to(KIND)
        row_sum = tl.sum(a.to(tl.float32), axis=1) + tl.sum(b.to(tl.float32), axis=1)
    return a, b, row_sum


@triton.jit
def load_page_rows(base, offsets, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[TILE, BLOCK] as the pages hold them; without a mask on the rows where all of them are known to be inside."""
    cols = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + cols[None, :]
    if MASKED:
        mask = inside[:, None]
        if SIZE != BLOCK:
            mask = mask & (cols < SIZE)[None, :]
        return tl.load(pointers, mask=mask, other=0)
    if SIZE != BLOCK:
        return tl.load(pointers, mask=(cols < SIZE)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def _places(keys, inside, table_base, K: tl.constexpr, MASKED: tl.constexpr):
    """The block of each key and its place in it."""
    if MASKED:
        blocks = tl.load(table_base + keys // K, mask=inside, other=0)
    else:
        blocks = tl.load(table_base + keys // K)
    return blocks.to(tl.int64), (keys % K).to(tl.int32)


@triton.jit
def empty_state(M: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr):
    """The state of no keys at all; merging it with another gives that other, bit by bit."""
    return (
        tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32),
        tl.zeros([M, A_BLOCK], tl.float32), tl.zeros([M, B_BLOCK], tl.float32),
    )  # fmt: skip


@triton.jit
def merge(m, den, a, b, m2, den2, a2, b2, B_SIZE: tl.constexpr):
    """The state of both sets of keys.  Used in registers and on stored partial results alike, so that both give the same bits."""
    top = tl.maximum(m, m2)
    base = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp2(m - base)
    y = tl.exp2(m2 - base)
    a = a * x[:, None] + a2 * y[:, None]
    if B_SIZE > 0:
        b = b * x[:, None] + b2 * y[:, None]
    return top, den * x + den2 * y, a, b


@triton.jit
def attend_tile(
    m, den, a, b, q_a, q_b, q_sum, start, position, end, k_base, v_base, table_base,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, A_SIZE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take the keys start to start + TILE into the state.

    position [M]: of each row's query, -1 for a row that sees nothing; end: one past the last key that is written.
    MASKED: false only where every row sees every key of the tile.
    The bases point at the KV head; slots from `end` on are never read as values, for what lies there may be NaN.
    """
    B_SIZE: tl.constexpr = D - A_SIZE
    keys = start + tl.arange(0, TILE)
    inside = keys < end
    if FORMAT == PLAIN and (position.shape[0] > 16 or K > 16 or cuda_capability_geq(10) or is_hip()):
        blocks, slots = _places(keys, inside, table_base, K, MASKED)
    else:
        # Unsigned, they take one instruction to divide instead of five.  Where registers are shortest that spilled a little.
        blocks, slots = _places(keys.to(tl.uint32), inside, table_base, K, MASKED)
    if FORMAT == PLAIN:
        offsets = blocks * (G * K * D) + slots * D
        scores = dot(q_a, tl.trans(load_page_rows(k_base, offsets, inside, A_SIZE, A_BLOCK, MASKED)), UPCAST)
        if B_SIZE > 0:
            scores += dot(q_b, tl.trans(load_page_rows(k_base + A_SIZE, offsets, inside, B_SIZE, B_BLOCK, MASKED)), UPCAST)
    else:
        # In 16-bit words.  One float32 per token lies behind the K * D codes of its block and head.
        first = blocks * (G * K * (D + 4) // 2)
        offsets = first + slots * (D // 2)
        even, odd = unpack(load_page_rows(k_base, offsets, inside, A_SIZE, A_BLOCK, MASKED), FORMAT)
        scores = dot(q_a, tl.trans(even.to(q_a.dtype)), UPCAST)
        scores += dot(q_b, tl.trans(odd.to(q_b.dtype)), UPCAST)
        scale_offsets = blocks * (G * K * (D + 4) // 4) + (K * D // 4 + slots)
        key_scale = tl.load(k_base.to(tl.pointer_type(tl.float32), bitcast=True) + scale_offsets, mask=inside, other=0.0)
        value_scale = tl.load(v_base.to(tl.pointer_type(tl.float32), bitcast=True) + scale_offsets, mask=inside, other=0.0)
        value_scale *= VALUE_FACTOR
        if FORMAT == INT8:
            scores -= INT8_OFFSET * q_sum[:, None]
        else:
            key_scale *= FP8_FACTOR
        if SOFTCAP == 0:
            key_scale *= SCALE * LOG2_E  # fewer than scores
        scores *= key_scale[None, :]
    if SOFTCAP > 0:
        # tanh as 1 - 2 / (e^2x + 1): finite for every x.
        scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * SCALE * LOG2_E / SOFTCAP)) + 1.0))
    elif FORMAT == PLAIN:
        scores *= SCALE * LOG2_E
    if MASKED:
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, axis=1))
    base = top
    if MASKED:
        base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m - base)
    den = den * alpha + tl.sum(p, axis=1)

    if FORMAT == PLAIN:
        v = load_page_rows(v_base, offsets, inside, A_SIZE, A_BLOCK, MASKED)
        p = p.to(q_a.dtype)
        a = a * alpha[:, None] + dot(p, v, UPCAST)
        if B_SIZE > 0:
            b = b * alpha[:, None] + dot(p, load_page_rows(v_base + A_SIZE, offsets, inside, B_SIZE, B_BLOCK, MASKED), UPCAST)
    else:
        even, odd = unpack(load_page_rows(v_base, offsets, inside, A_SIZE, A_BLOCK, MASKED), FORMAT)
        p = (p * value_scale[None, :]).to(q_a.dtype)
        a = a * alpha[:, None] + dot(p, even.to(p.dtype), UPCAST)
        b = b * alpha[:, None] + dot(p, odd.to(p.dtype), UPCAST)
        if FORMAT == INT8:
            if p.shape[0] <= 16:
                # A product with the constant costs less than the sum of p across threads, of which few rows are spread over many.
                offset = tl.full([TILE, A_BLOCK], -INT8_OFFSET, tl.float32).to(p.dtype)
                a += dot(p, offset, UPCAST)
                b += dot(p, offset, UPCAST)
            else:
                excess = INT8_OFFSET * tl.sum(p.to(tl.float32), axis=1)[:, None]
                a -= excess
                b -= excess
    return top, den, a, b


@triton.jit
def initial_state(m, den, a, b, sinks_ptr, heads):
    """The empty state, or, where there are sinks, the state of one key of that score and of value 0."""
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        den += 1.0
    return m, den, a, b


@triton.jit
def store_output(
    out_ptr,
    offsets,
    live,
    den,
    a,
    b,
    D: tl.constexpr,
    A_SIZE: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Divide and write; a row that saw no key becomes 0."""
    norm = tl.where(den > 0.0, den, 1.0)
    if FORMAT == INT8:
        norm *= VALUE_FACTOR
    if FORMAT == FP8:
        norm *= VALUE_FACTOR / FP8_FACTOR
    STEP: tl.constexpr = 1 if FORMAT == PLAIN else 2
    B_FIRST: tl.constexpr = A_SIZE if FORMAT == PLAIN else 1
    kind = out_ptr.dtype.element_ty
    a_cols = tl.arange(0, A_BLOCK)
    a_mask = live[:, None] & (a_cols < A_SIZE)[None, :]
    tl.store(out_ptr + offsets[:, None] + STEP * a_cols[None, :], (a / norm[:, None]).to(kind), mask=a_mask)
    if D > A_SIZE:
        b_cols = tl.arange(0, B_BLOCK)
        b_mask = live[:, None] & (b_cols < D - A_SIZE)[None, :]
        tl.store(out_ptr + offsets[:, None] + B_FIRST + STEP * b_cols[None, :], (b / norm[:, None]).to(kind), mask=b_mask)
