"""Attention of few query tokens per sequence over paged keys and values: decode, verification of drafts, short prompt ends.

Shapes:  q, out [T, H, D]; pages [B, G, K, D] or their 8-bit layout (kernels.kv_format); block_tables [S, max_blocks] int32.
Floor:   per layer 2 c G D e bytes for a context of c tokens of e bytes an element, plus 4 T H D for q and the output:
         4 KB a token of context at 8 KV heads of 128 in bf16.  4 H D c FLOPs, H / G * 2 / e per byte: the bytes decide.
How:     A program takes (sequence, block of query tokens, leaf of the context, KV head) from the list of kernels.attention_plan;
         the query rows of one KV head are one tile, so each key is read once.  Programs are as many as the GPU holds and draw
         their next item by a ticket.  Who finishes the last leaf of a group merges the group, who finishes the last group
         writes the output, at once where there is one: no second launch, and every counter is back at zero afterwards.
Source:  Kwon et al. 2023, PagedAttention; Dao et al. 2023, Flash-Decoding; Hong et al. 2024, LeanAttention (splits of one
         length; unlike it, ours never end where a program's share ends, because a row's bits must not depend on its company).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagestream.kernels.attention_plan import AttentionConfig, AttentionPlan, AttentionWorkspace, leaf_range
from pagestream.kernels.attention_tile import (
    PLAIN,
    attend_tile,
    empty_state,
    head_parts,
    initial_state,
    load_queries,
    merge,
    query_rows,
    store_output,
)
from pagestream.kernels.kv_format import check_pages, head_size_of, is_quantised, page_format, page_words
from pagestream.kernels.paged_prefill import paged_prefill


@triton.jit
def _store_state(
    base_ptr, rows, live, m, den, a, b, D: tl.constexpr, A_SIZE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr
):
    """Write the live rows' states into rows of D + 4 floats.

    No thread writes before all have read what may lie there, and none goes on before all have written.
    """
    tl.debug_barrier()
    base = base_ptr + rows * (D + 4)
    a_cols = tl.arange(0, A_BLOCK)[None, :]
    tl.store(base[:, None] + a_cols, a, mask=live[:, None] & (a_cols < A_SIZE))
    if D > A_SIZE:
        b_cols = tl.arange(0, B_BLOCK)[None, :]
        tl.store(base[:, None] + A_SIZE + b_cols, b, mask=live[:, None] & (b_cols < D - A_SIZE))
    tl.store(base + D, m, mask=live)
    tl.store(base + D + 1, den, mask=live)
    tl.debug_barrier()


@triton.jit
def _load_state(base_ptr, rows, live, b, D: tl.constexpr, A_SIZE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr):
    """The states that _store_state wrote; empty ones for the other rows.  b stands in for a tail where there is none."""
    base = base_ptr + rows * (D + 4)
    # Past the first-level cache: another program may have written it.
    a_cols = tl.arange(0, A_BLOCK)[None, :]
    a = tl.load(base[:, None] + a_cols, mask=live[:, None] & (a_cols < A_SIZE), other=0.0, cache_modifier=".cg")
    if D > A_SIZE:
        b_cols = tl.arange(0, B_BLOCK)[None, :]
        b = tl.load(base[:, None] + A_SIZE + b_cols, mask=live[:, None] & (b_cols < D - A_SIZE), other=0.0, cache_modifier=".cg")
    m = tl.load(base + D, mask=live, other=float("-inf"), cache_modifier=".cg")
    den = tl.load(base + D + 1, mask=live, other=0.0, cache_modifier=".cg")
    return m, den, a, b


@triton.jit
def _fold(
    m, den, a, b, partials_ptr, rows, second, step, count, live,
    D: tl.constexpr, A_SIZE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge `count` stored states into this one, in order: the first at `rows`, one `second` rows on, the others `step` apart."""
    # Two at once where the registers hold them.
    FOLD: tl.constexpr = 2 if D == A_SIZE else 1
    for start in range(0, count, FOLD):
        for j in tl.static_range(FOLD):
            i = tl.zeros_like(rows) + start + j
            here = rows + tl.where(i > 0, second + (i - 1) * step, 0)
            m2, den2, a2, b2 = _load_state(partials_ptr, here, live & (i < count), b, D, A_SIZE, A_BLOCK, B_BLOCK)
            m, den, a, b = merge(m, den, a, b, m2, den2, a2, b2, D - A_SIZE)
    return m, den, a, b


@triton.jit(do_not_specialize=["table_stride", "q_stride"])
def _paged_attention_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, out_ptr, sinks_ptr, tables_ptr, table_stride, seq_lens_ptr, query_start_ptr,
    items_ptr, count_ptr, ticket_ptr, partials_ptr, arrivals_ptr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, LEAF: tl.constexpr, GROUP: tl.constexpr, OWN_SLOTS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    COMPUTE: tl.constexpr = tl.float16 if FORMAT != PLAIN and q_ptr.dtype.element_ty == tl.bfloat16 else q_ptr.dtype.element_ty
    A_SIZE: tl.constexpr = PARTS[0]
    A_BLOCK: tl.constexpr = PARTS[1]
    B_BLOCK: tl.constexpr = PARTS[2]
    B_SIZE: tl.constexpr = D - A_SIZE
    HEAD: tl.constexpr = K * D if FORMAT == PLAIN else K * (D + 4) // 2
    PER_KV: tl.constexpr = H // G
    BLOCK: tl.constexpr = M // PER_KV
    total = tl.load(count_ptr) * G
    # The first item too: a program that the GPU has no room for yet must not keep one back.
    work = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while work < total:
        # Drawn before the work, to hide its latency.
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        head = work % G
        item_ptr = items_ptr + (work // G) * 4
        sequence = tl.load(item_ptr)
        query_block = tl.load(item_ptr + 1)
        leaf = tl.load(item_ptr + 2)
        sequence_slot = tl.load(item_ptr + 3)
        query_first = tl.load(query_start_ptr + sequence)
        query_len = tl.load(query_start_ptr + sequence + 1) - query_first
        seq_len = tl.load(seq_lens_ptr + sequence)
        low, high = leaf_range(seq_len, query_len, LEAF, WINDOW)

        rows = tl.arange(0, M)
        token, heads, live, position, first_position, end, q_base, q_offsets = query_rows(
            query_block, query_first, query_len, seq_len, head, q_ptr, q_stride, M, PER_KV, D
        )
        block_len = end - first_position
        q_a, q_b, q_sum = load_queries(q_base, q_offsets, live, D, A_SIZE, A_BLOCK, B_BLOCK, FORMAT, COMPUTE)
        k_base = k_ptr + head * HEAD
        v_base = v_ptr + head * HEAD
        table_base = tables_ptr + sequence.to(tl.int64) * table_stride

        from_leaf = tl.where(leaf < 0, low, low + leaf)
        to_leaf = tl.where(leaf < 0, high, low + leaf + 1)
        # Where partial results go: rows of the sequence's own slots (slot, head), or, where it found none and this program walks
        # through all leaves, rows of the program's own: GROUP for the leaves of a group, then one for each group.
        is_split = leaf >= 0
        unit_slot = sequence_slot + query_block * BLOCK * (high - low)
        shared_row = tl.num_programs(0) * (OWN_SLOTS * M) + (unit_slot + rows // PER_KV) * H + heads
        leaf_row = tl.where(is_split, shared_row, tl.program_id(0) * (OWN_SLOTS * M) + rows)
        leaf_step = tl.where(is_split, block_len * H, M)
        counters = arrivals_ptr + (unit_slot * G + head) * 2
        first_group = low // GROUP
        num_groups = tl.cdiv(high, GROUP) - first_group
        finished = leaf < 0
        m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
        for this_leaf in range(from_leaf, to_leaf):
            start = this_leaf * LEAF
            if WINDOW > 0:
                start = tl.maximum(start, tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE)
            m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
            for tile in tl.range(start, tl.minimum(this_leaf * LEAF + LEAF, end), TILE):
                m, den, a, b = attend_tile(
                    m, den, a, b, q_a, q_b, q_sum, tile, position, end, k_base, v_base, table_base,
                    G, K, D, A_SIZE, A_BLOCK, B_BLOCK, TILE, SCALE, WINDOW, SOFTCAP, FORMAT, True, UPCAST,
                )  # fmt: skip
            if high - low > 1:
                group = this_leaf // GROUP
                group_first = tl.maximum(low, group * GROUP)
                group_leaves = tl.minimum(high, (group + 1) * GROUP) - group_first
                group_row = leaf_row + tl.where(is_split, group_first - low, 0) * leaf_step
                _store_state(
                    partials_ptr,
                    group_row + (this_leaf - group_first) * leaf_step,
                    live,
                    m,
                    den,
                    a,
                    b,
                    D,
                    A_SIZE,
                    A_BLOCK,
                    B_BLOCK,
                )
                counter = counters + (group_first - low) * block_len * (G * 2)
                arrived = this_leaf - group_first
                if leaf >= 0:
                    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                if arrived == group_leaves - 1:
                    m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
                    m, den, a, b = _fold(
                        m,
                        den,
                        a,
                        b,
                        partials_ptr,
                        group_row,
                        leaf_step,
                        leaf_step,
                        group_leaves,
                        live,
                        D,
                        A_SIZE,
                        A_BLOCK,
                        B_BLOCK,
                    )
                    if leaf >= 0:
                        tl.store(counter, 0)
                    finished = (high > low) & (num_groups == 1)
                    if num_groups > 1:
                        # In the sequence's slots the result takes the place of the group's first leaf, which nobody needs any more.
                        result_row = group_row + tl.where(is_split, 0, GROUP + group - first_group) * leaf_step
                        _store_state(partials_ptr, result_row, live, m, den, a, b, D, A_SIZE, A_BLOCK, B_BLOCK)
                        arrived = group - first_group
                        if leaf >= 0:
                            arrived = tl.atomic_add(counters + 1, 1, sem="acq_rel")
                        if arrived == num_groups - 1:
                            if leaf >= 0:
                                tl.store(counters + 1, 0)
                            m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
                            m, den, a, b = initial_state(m, den, a, b, sinks_ptr, heads)
                            total_row = leaf_row + tl.where(is_split, 0, GROUP) * leaf_step
                            second = tl.where(is_split, GROUP - low % GROUP, 1) * leaf_step
                            step = tl.where(is_split, GROUP, 1) * leaf_step
                            m, den, a, b = _fold(
                                m, den, a, b, partials_ptr, total_row, second, step, num_groups, live, D, A_SIZE, A_BLOCK, B_BLOCK
                            )
                            finished = high > low
        if num_groups <= 1:
            # What one leaf or one group gives needs no second meeting.
            one_m, one_den, one_a, one_b = m, den, a, b
            m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
            m, den, a, b = initial_state(m, den, a, b, sinks_ptr, heads)
            m, den, a, b = merge(m, den, a, b, one_m, one_den, one_a, one_b, B_SIZE)
        if finished:
            out_base = out_ptr + query_first.to(tl.int64) * (H * D)
            store_output(out_base, token * (H * D) + heads * D, live, den, a, b, D, A_SIZE, A_BLOCK, B_BLOCK, FORMAT)
        work = ticket
    # Everybody draws one ticket that is no item's; whoever draws the last of them is the last to draw.
    if work == total + tl.num_programs(0) - 1:
        tl.store(ticket_ptr, 0)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, plan: AttentionPlan,
    workspace: AttentionWorkspace, config: AttentionConfig, *,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None, upcast: bool = False,
) -> Tensor:  # fmt: skip
    """Attend every query token to the cached keys of its own sequence up to its own position.

    Shapes:  q [T, H, D], each token's heads contiguous; pages as in kernels.kv_format; block_tables [S, max_blocks] int32;
             plan from make_plan of the same config, whose window applies; sinks [H] float32.
             Returns [T, H, D] contiguous, dtype of q; rows of no sequence are left unwritten.
    Numbers: scores and sums in float32, products in the dtype of q (float16 for 8-bit pages under bfloat16); a row depends on its
             own sequence, its number of query tokens being short or long, and the config.
    Raises:  ValueError on shapes, dtypes or strides that do not fit.
    Does not write the cache: call reshape_and_cache first.
    upcast:  multiply in float32; the interpreter needs it for bfloat16.
    Oracle:  kernels.reference.paged_attention
    """
    check_pages(k_cache, v_cache)
    (num_tokens, num_heads, head_size), (_, num_kv_heads, block_size, _) = q.shape, k_cache.shape
    if head_size_of(k_cache) != head_size or num_heads % num_kv_heads or head_size % 8:
        raise ValueError(f"q {tuple(q.shape)} does not fit pages {tuple(k_cache.shape)}")
    if q.stride(2) != 1 or q.stride(1) != head_size or q.stride(0) % 8:
        raise ValueError("the heads of a token must lie one after another, and tokens a multiple of 8 elements apart")
    if num_tokens * q.stride(0) >= 1 << 31:
        raise ValueError(f"{num_tokens} tokens {q.stride(0)} elements apart are more than the kernels address in 32 bits")
    if config.leaf % config.tile or config.rows < num_heads // num_kv_heads:
        raise ValueError(f"{config} does not fit {num_heads // num_kv_heads} heads per KV head")
    out = torch.empty(num_tokens, num_heads, head_size, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    _paged_attention_kernel[(workspace.num_programs,)](
        q, q.stride(0), page_words(k_cache), page_words(v_cache), out, sinks, block_tables, block_tables.stride(0),
        plan.seq_lens, plan.query_start, plan.short_items, plan.counts, workspace.tickets,
        workspace.partials, workspace.arrivals,
        H=num_heads, G=num_kv_heads, K=block_size, D=head_size, PARTS=head_parts(head_size, is_quantised(k_cache.dtype)),
        SCALE=scale, WINDOW=plan.window, SOFTCAP=softcap or 0.0, FORMAT=page_format(k_cache),
        M=config.rows, TILE=config.tile, LEAF=config.leaf, GROUP=config.group, OWN_SLOTS=workspace.own_slots, UPCAST=upcast,
        **config.short_options(),
    )  # fmt: skip
    if plan.has_long:
        paged_prefill(
            q,
            k_cache,
            v_cache,
            block_tables,
            plan,
            workspace,
            config,
            out,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            upcast=upcast,
        )
    return out
