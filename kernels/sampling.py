"""From logits to tokens in two launches: bias, penalties, mask, temperature, top-k, top-p, min-p, the draw, and its logprob.

Shapes:  logits [R, V] float32 or 16 bit, only read.
Floor:   one read of the logits (4 V bytes a row, 0.5 MB at V = 128 k), V / 8 bytes of a mask; rows that truncate write and
         reread V floats, from then on mostly out of the cache.
How:     The first kernel cuts each row into blocks: it applies all that changes single logits, and takes each block's log-sum-exp
         of the untouched logits and its best noisy score.  What changes few tokens comes as a list and is applied in memory, for
         registers can't be addressed: only rows that have one pay for it, and nothing is kept on the device between steps.
         The second has one program a row: it folds the blocks, or, where the
         row truncates, finds the threshold by a search over the bits of the values, without a sort, and draws above it.
         The draw is the maximum of score + Gumbel noise; the noise of a token is a function of (seed, position, token), so
         that neither neighbours nor the order of programs can move it.
Source:  Salmon et al. 2011, Philox (7 rounds); Gumbel 1954 for the maximum; order of truncation: top-k, top-p over what is left,
         min-p, each leaving one token at least; of equal scores the lower token ids stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
GREEDY_BELOW = tl.constexpr(1e-5)  # of temperatures
LARGEST = tl.constexpr(3.4028234663852886e38)
# Columns of SamplingTable.
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(6))
TOP_K, SEED, POSITION, MASK_AT, BIASES_AT, COUNTS_AT, RULED_OUT_AT, ENTRIES_END = (tl.constexpr(i) for i in range(8))
NUM_FLOATS, NUM_INTS = 8, 8
ENTRY = 2  # words: a token, and the bits of a float32
ENTRIES = 256  # of a list at a time


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """What rows are to be sampled with; all of it on the device, so that a captured graph can be replayed with other contents.

    A row of zeros is greedy and changes nothing.  A mask has ceil(V / 32) words: bit t % 32 of word t // 32 allows t.  A list has
    entries of two words, a token and a float32; in the first two lists of a row no token stands twice.  Rows may share both.
    """

    floats: Tensor  # [R, 8] float32: temperature, top_p, min_p, repetition, frequency and presence penalty
    # [R, 8] int64: top_k (0: off), seed, position; then places in `words`: the row's mask (0: none), and where its lists begin
    # and the last one ends: what to add; how often a token was said (0: in the prompt only); what is ruled out
    ints: Tensor
    words: Tensor  # [W] int32, W < 2^31


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Tensor  # [R] int64; -1 where no token is allowed
    logprobs: Tensor  # [R] float32, of the untouched logits
    log_sum_exp: Tensor  # [R] float32, of the untouched logits; not finite where these are not


@triton.jit
def _gumbel(seed, position, tokens):
    bits, _, _, _ = tl.philox(seed, tokens, position.to(tl.int32) + tokens * 0, tokens * 0, tokens * 0, 7)
    # 24 bits and a half: strictly between 0 and 1.
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _entries(words_ptr, first, end, block, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """Some entries of a list: tokens, values, and which of them belong to this block."""
    at = first + 2 * tl.arange(0, ENTRIES)
    token = tl.load(words_ptr + at, mask=at < end, other=0)
    here = (at < end) & (token // BLOCK == block)
    return token, tl.load(words_ptr + at + 1, mask=here, other=0).to(tl.float32, bitcast=True), here


@triton.jit
def _apply_lists(scores_ptr, words_ptr, floats, ints, block, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """Change this block's scores, which all threads have written, by the row's three lists, one after another."""
    biases_at, counts_at = tl.load(ints + BIASES_AT).to(tl.int32), tl.load(ints + COUNTS_AT).to(tl.int32)
    ruled_out_at, end = tl.load(ints + RULED_OUT_AT).to(tl.int32), tl.load(ints + ENTRIES_END).to(tl.int32)
    tl.debug_barrier()
    for first in range(biases_at, counts_at, 2 * ENTRIES):
        token, value, here = _entries(words_ptr, first, counts_at, block, BLOCK, ENTRIES)
        tl.store(scores_ptr + token, tl.load(scores_ptr + token, mask=here, other=0.0) + value, mask=here)
    tl.debug_barrier()
    for first in range(counts_at, ruled_out_at, 2 * ENTRIES):
        token, count, here = _entries(words_ptr, first, ruled_out_at, block, BLOCK, ENTRIES)
        x = tl.load(scores_ptr + token, mask=here, other=0.0)
        repetition = tl.load(floats + REPETITION)
        x = tl.where(x > 0, tl.minimum(tl.div_rn(x, repetition), LARGEST), x * repetition)
        x -= tl.load(floats + FREQUENCY) * count
        x -= tl.where(count > 0, tl.load(floats + PRESENCE), 0.0)
        tl.store(scores_ptr + token, x, mask=here)
    tl.debug_barrier()
    for first in range(ruled_out_at, end, 2 * ENTRIES):
        token, value, here = _entries(words_ptr, first, end, block, BLOCK, ENTRIES)
        tl.store(scores_ptr + token, value * 0.0 + float("-inf"), mask=here)
    tl.debug_barrier()


@triton.jit
def _scores_kernel(
    logits_ptr, scores_ptr, blocks_ptr, best_ptr, floats_ptr, ints_ptr, words_ptr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < V
    floats = floats_ptr + row * 8
    ints = ints_ptr + row * 8
    temperature = tl.load(floats + TEMPERATURE)
    x = tl.load(logits_ptr + row * STRIDE + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    stats = blocks_ptr + (row * NUM_BLOCKS + block) * 3
    tl.store(stats, top)
    tl.store(stats + 1, tl.sum(tl.exp(x - base), axis=0))

    if tl.load(ints + ENTRIES_END) > tl.load(ints + BIASES_AT):
        tl.store(scores_ptr + row * V + tokens, x, mask=inside)
        _apply_lists(scores_ptr + row * V, words_ptr, floats, ints, block, BLOCK, ENTRIES)
        x = tl.load(scores_ptr + row * V + tokens, mask=inside, other=float("-inf"))
    mask_at = tl.load(ints + MASK_AT).to(tl.int32)
    if mask_at > 0:
        words = tl.load(words_ptr + mask_at + tokens // 32, mask=inside, other=0)
        x = tl.where(((words >> (tokens % 32)) & 1) > 0, x, float("-inf"))
    x = tl.where(inside, x, float("-inf"))

    is_greedy = temperature < GREEDY_BELOW
    if is_greedy == 0:
        x = x / temperature
    top_k = tl.load(ints + TOP_K)
    truncates = ((top_k > 0) & (top_k < V)) | (tl.load(floats + TOP_P) < 1.0) | (tl.load(floats + MIN_P) > 0.0)
    if (is_greedy == 0) & truncates:
        tl.store(scores_ptr + row * V + tokens, x, mask=inside)
    else:
        if is_greedy == 0:
            x += _gumbel(tl.load(ints + SEED), tl.load(ints + POSITION), tokens)
        best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(stats + 2, best)
        tl.store(best_ptr + row * NUM_BLOCKS + block, block * BLOCK + index)


@triton.jit
def _key(x):
    """An integer that is ordered as the floats are.  -0.0 is made +0.0 first, for they are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _above(scores_ptr, top, pivot, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores have a key of at least `pivot`, and the sum of their exponentials, those of one place in a block first.

    So the threads exchange theirs once at the end, not for each block.
    """
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + tokens, mask=tokens < V, other=float("-inf"))
        over = (_key(x) >= pivot) & (tokens < V)
        counts += over.to(tl.int32)
        masses += tl.where(over, tl.exp(x - top), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _narrow(low, high, low_count, high_count, pivot, count, mass, want_count, want_mass):
    """One pivot's news: it becomes the new low where what is above it is enough, else the new high."""
    enough = (count >= want_count) & (mass >= want_mass)
    is_low = enough & (pivot > low) & (pivot < high)
    is_high = (enough == 0) & (pivot < high)
    low, low_count = tl.where(is_low, pivot, low), tl.where(is_low, count, low_count)
    high, high_count = tl.where(is_high, pivot, high), tl.where(is_high, count, high_count)
    return low, high, low_count, high_count


@triton.jit
def _search(scores_ptr, top, low, high, low_count, want_count, want_mass, V: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the last score that is needed: what is at or above it is enough, without it not.

    Enough are want_count scores, or want_mass of their exponentials.  Each pass tries three pivots, so that an interval of keys
    shrinks to a quarter; it ends early once a single score is left in it, and then returns a key below that score's own.
    """
    tl.static_assert(V <= 1023 * BLOCK)
    high_count = low_count * 0
    while (high - low > 1) & (low_count - high_count > 1):
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        counts = tl.zeros([BLOCK], tl.int32)  # of all three pivots, ten bits each, for registers are few
        masses1, masses2, masses3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = tl.load(scores_ptr + tokens, mask=tokens < V, other=float("-inf"))
            weight = tl.exp(x - top)
            key = _key(x)
            # The pivots lie between keys, which have 32 bits.
            over1 = (key >= first.to(tl.int32)) & (tokens < V)
            over2 = (key >= second.to(tl.int32)) & (tokens < V)
            over3 = (key >= third.to(tl.int32)) & (tokens < V)
            counts += over1.to(tl.int32) + (over2.to(tl.int32) << 10) + (over3.to(tl.int32) << 20)
            masses1 += tl.where(over1, weight, 0.0)
            masses2 += tl.where(over2, weight, 0.0)
            masses3 += tl.where(over3, weight, 0.0)
        count1, count2 = tl.sum(counts & 1023, axis=0), tl.sum((counts >> 10) & 1023, axis=0)
        count3 = tl.sum(counts >> 20, axis=0)
        mass1, mass2, mass3 = tl.sum(masses1, axis=0), tl.sum(masses2, axis=0), tl.sum(masses3, axis=0)
        low, high, low_count, high_count = _narrow(low, high, low_count, high_count, first, count1, mass1, want_count, want_mass)
        low, high, low_count, high_count = _narrow(low, high, low_count, high_count, second, count2, mass2, want_count, want_mass)
        low, high, low_count, high_count = _narrow(low, high, low_count, high_count, third, count3, mass3, want_count, want_mass)
    return low


@triton.jit
def _draw_kernel(
    logits_ptr, scores_ptr, blocks_ptr, best_ptr, floats_ptr, ints_ptr, tokens_ptr, logprobs_ptr, lse_ptr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    floats = floats_ptr + row * 8
    ints = ints_ptr + row * 8
    blocks = tl.arange(0, FOLD)
    stats = blocks_ptr + (row * NUM_BLOCKS + blocks) * 3
    tops = tl.load(stats, mask=blocks < NUM_BLOCKS, other=float("-inf"))
    top = tl.max(tops, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(stats + 1, mask=blocks < NUM_BLOCKS, other=0.0)
    lse = base + tl.log(
        tl.sum(tl.where(sums > 0, sums * tl.exp(tl.where(tops == float("-inf"), 0.0, tops) - base), sums), axis=0)
    )

    temperature = tl.load(floats + TEMPERATURE)
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    truncates = ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0)
    best = top * 0.0 + float("-inf")
    token = top_k * 0 - 1
    if (temperature >= GREEDY_BELOW) & truncates:
        mine = scores_ptr + row * V
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            peaks = tl.maximum(peaks, tl.load(mine + at, mask=at < V, other=float("-inf")))
        peak = tl.max(peaks, axis=0)
        if peak > float("-inf"):
            # Keys as 64 bit, so that their differences cannot overflow.
            high = _key(peak).to(tl.int64) + 1
            low = top_k * 0 - 2139095042  # just below the key of -inf
            all_count, all_mass = _above(mine, peak, low.to(tl.int32), V, BLOCK)
            none = all_count * 0
            keep_from = low  # every key above it stays, and of those equal to it the first num_equal
            num_equal = top_k * 0 + V
            mass_kept = all_mass
            if (top_k > 0) & (top_k < V):
                keep_from = _search(mine, peak, low, high, all_count, top_k, 0.0, V, BLOCK)
                at_least, mass_at_least = _above(mine, peak, keep_from.to(tl.int32), V, BLOCK)
                above, mass_above = _above(mine, peak, keep_from.to(tl.int32) + 1, V, BLOCK)
                # The search may have ended early below the last needed score, with nothing in between.
                num_equal = tl.where(at_least > top_k, top_k - above, V)
                share = (mass_at_least - mass_above) / tl.maximum(at_least - above, 1).to(tl.float32)
                mass_kept = tl.where(at_least > top_k, mass_above + share * num_equal.to(tl.float32), mass_at_least)
            if top_p < 1.0:
                want = top_p * mass_kept
                kept_from = keep_from
                keep_from = _search(mine, peak, kept_from, high, all_count, 1, want, V, BLOCK)
                at_least, mass_at_least = _above(mine, peak, keep_from.to(tl.int32), V, BLOCK)
                above, mass_above = _above(mine, peak, keep_from.to(tl.int32) + 1, V, BLOCK)
                share = (mass_at_least - mass_above) / tl.maximum(at_least - above, 1).to(tl.float32)
                needed = tl.maximum(tl.ceil((want - mass_above) / tl.maximum(share, 1e-38)), 1.0)
                needed = tl.minimum(needed, 1.0 * V).to(tl.int64)
                num_equal = tl.where(
                    at_least - above > 1, tl.where(keep_from == kept_from, tl.minimum(needed, num_equal), needed), V
                )
            if min_p > 0.0:
                least = _key(peak + tl.log(tl.minimum(min_p, 1.0))).to(tl.int64)
                num_equal = tl.where(least > keep_from, V, num_equal)
                keep_from = tl.maximum(keep_from, least)
            seen_equal = none
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(mine + at, mask=at < V, other=float("-inf"))
                key = _key(x).to(tl.int64)
                equal = ((key == keep_from) & (at < V)).to(tl.int32)
                # Of most blocks nothing is kept, and noise costs more than all else.
                if tl.max(((key >= keep_from) & (at < V)).to(tl.int32), axis=0) > 0:
                    rank = seen_equal + tl.cumsum(equal, axis=0)
                    keep = (key > keep_from) | ((equal > 0) & (rank <= num_equal))
                    noisy = tl.where(keep, x + _gumbel(tl.load(ints + SEED), tl.load(ints + POSITION), at), float("-inf"))
                    block_best, index = tl.max(noisy, axis=0, return_indices=True, return_indices_tie_break_left=True)
                    token = tl.where(block_best > best, (start + index).to(tl.int64), token)
                    best = tl.maximum(best, block_best)
                    seen_equal += tl.sum(equal, axis=0)
    else:
        bests = tl.load(stats + 2, mask=blocks < NUM_BLOCKS, other=float("-inf"))
        best, index = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
        if best > float("-inf"):
            token = tl.load(best_ptr + row * NUM_BLOCKS + index).to(tl.int64)
    chosen = tl.load(logits_ptr + row * STRIDE + tl.maximum(token, 0)).to(tl.float32)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, chosen - lse)
    tl.store(lse_ptr + row, lse)


def sample(logits: Tensor, table: SamplingTable) -> Sampled:
    """Draw one token for every row.

    Shapes:  logits [R, V], contiguous rows; table as SamplingTable says.  A temperature below 1e-5 takes the likeliest token.
    Numbers: in float32; a row depends on itself and its own entries alone.
    Raises:  ValueError on rows that are not contiguous.
    Oracle:  kernels.reference.sampling_scores, of which the answer is the maximum
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    options: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
    scores = torch.empty(num_rows, vocab_size, **options)
    blocks = torch.empty(num_rows, num_blocks, 3, **options)
    best = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    sampled = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=logits.device), *(torch.empty(num_rows, **options) for _ in range(2))
    )
    if num_rows == 0:
        return sampled
    sizes = {"V": vocab_size, "STRIDE": logits.stride(0), "BLOCK": BLOCK, "NUM_BLOCKS": num_blocks}
    _scores_kernel[(num_rows, num_blocks)](
        logits, scores, blocks, best, table.floats, table.ints, table.words, **sizes, ENTRIES=ENTRIES, num_warps=8,
        enable_fp_fusion=False,  # the penalties' products are rounded before they are subtracted, as in plain torch
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, scores, blocks, best, table.floats, table.ints, sampled.tokens, sampled.logprobs, sampled.log_sum_exp,
        **sizes, FOLD=triton.next_power_of_2(num_blocks), num_warps=16,
    )  # fmt: skip
    return sampled
