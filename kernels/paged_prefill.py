"""Attention of many query tokens per sequence over pages: prompts and their chunks, with or without a cached prefix.

Shapes:  as kernels.paged_attention.
Floor:   4 H D FLOPs per pair of query and visible key, 2 H D S^2 for a prompt of S tokens; 2 G D e bytes per key and block of
         queries, mostly from the cache.  Beyond about 200 query tokens the FLOPs decide.
How:     A program takes (sequence, block of query tokens, KV head) from the list of kernels.attention_plan and walks through all
         keys once: first tiles that only some rows see (the edge of a window), then tiles that need no mask, then the diagonal.
Source:  Dao 2023, FlashAttention-2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagestream.kernels.attention_plan import AttentionConfig, AttentionPlan, AttentionWorkspace
from pagestream.kernels.attention_tile import (
    PLAIN,
    attend_tile,
    empty_state,
    head_parts,
    initial_state,
    load_queries,
    query_rows,
    store_output,
)
from pagestream.kernels.kv_format import is_quantised, page_format, page_words


@triton.jit(do_not_specialize=["table_stride", "q_stride"])
def _paged_prefill_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, out_ptr, sinks_ptr, tables_ptr, table_stride, seq_lens_ptr, query_start_ptr,
    items_ptr, count_ptr, ticket_ptr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    COMPUTE: tl.constexpr = tl.float16 if FORMAT != PLAIN and q_ptr.dtype.element_ty == tl.bfloat16 else q_ptr.dtype.element_ty
    A_SIZE: tl.constexpr = PARTS[0]
    A_BLOCK: tl.constexpr = PARTS[1]
    B_BLOCK: tl.constexpr = PARTS[2]
    HEAD: tl.constexpr = K * D if FORMAT == PLAIN else K * (D + 4) // 2
    PER_KV: tl.constexpr = H // G
    total = tl.load(count_ptr) * G
    # The first item too: a program that the GPU has no room for yet must not keep one back.
    work = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while work < total:
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        head = work % G
        sequence = tl.load(items_ptr + (work // G) * 4)
        query_block = tl.load(items_ptr + (work // G) * 4 + 1)
        query_first = tl.load(query_start_ptr + sequence)
        query_len = tl.load(query_start_ptr + sequence + 1) - query_first
        seq_len = tl.load(seq_lens_ptr + sequence)

        token, heads, live, position, first_position, end, q_base, q_offsets = query_rows(
            query_block, query_first, query_len, seq_len, head, q_ptr, q_stride, M, PER_KV, D
        )
        q_a, q_b, q_sum = load_queries(q_base, q_offsets, live, D, A_SIZE, A_BLOCK, B_BLOCK, FORMAT, COMPUTE)
        k_base = k_ptr + head * HEAD
        v_base = v_ptr + head * HEAD
        table_base = tables_ptr + sequence.to(tl.int64) * table_stride

        # [start, full_start): the window's edge | [full_start, full_end): all rows see all keys | [full_end, end): the diagonal
        start = seq_len * 0
        full_start = start
        full_end = (first_position + 1) // TILE * TILE
        if WINDOW > 0:
            start = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
            full_start = tl.maximum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, start)
            full_end = tl.maximum(full_end, full_start)
        m, den, a, b = empty_state(M, A_BLOCK, B_BLOCK)
        m, den, a, b = initial_state(m, den, a, b, sinks_ptr, heads)
        if WINDOW > 0:
            for tile in tl.range(start, tl.minimum(full_start, end), TILE):
                m, den, a, b = attend_tile(
                    m, den, a, b, q_a, q_b, q_sum, tile, position, end, k_base, v_base, table_base,
                    G, K, D, A_SIZE, A_BLOCK, B_BLOCK, TILE, SCALE, WINDOW, SOFTCAP, FORMAT, True, UPCAST,
                )  # fmt: skip
        for tile in tl.range(full_start, full_end, TILE):
            m, den, a, b = attend_tile(
                m, den, a, b, q_a, q_b, q_sum, tile, position, end, k_base, v_base, table_base,
                G, K, D, A_SIZE, A_BLOCK, B_BLOCK, TILE, SCALE, WINDOW, SOFTCAP, FORMAT, False, UPCAST,
            )  # fmt: skip
        for tile in tl.range(full_end, end, TILE):
            m, den, a, b = attend_tile(
                m, den, a, b, q_a, q_b, q_sum, tile, position, end, k_base, v_base, table_base,
                G, K, D, A_SIZE, A_BLOCK, B_BLOCK, TILE, SCALE, WINDOW, SOFTCAP, FORMAT, True, UPCAST,
            )  # fmt: skip
        out_offsets = (query_first + token).to(tl.int64) * (H * D) + heads * D
        store_output(out_ptr, out_offsets, live, den, a, b, D, A_SIZE, A_BLOCK, B_BLOCK, FORMAT)
        work = ticket
    # Everybody draws one ticket that is no item's; whoever draws the last of them is the last to draw.
    if work == total + tl.num_programs(0) - 1:
        tl.store(ticket_ptr, 0)


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, plan: AttentionPlan,
    workspace: AttentionWorkspace, config: AttentionConfig, out: Tensor, *,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None, upcast: bool = False,
) -> None:  # fmt: skip
    """The long sequences' part of kernels.paged_attention, which checks the arguments and calls this; writes into out."""
    _, num_heads, head_size = q.shape
    _paged_prefill_kernel[(workspace.num_long_programs,)](
        q, q.stride(0), page_words(k_cache), page_words(v_cache), out, sinks, block_tables, block_tables.stride(0),
        plan.seq_lens, plan.query_start, plan.long_items, plan.counts[1:], workspace.tickets[1:],
        H=num_heads, G=k_cache.shape[1], K=k_cache.shape[2], D=head_size, PARTS=head_parts(head_size, is_quantised(k_cache.dtype)),
        SCALE=scale, WINDOW=plan.window, SOFTCAP=softcap or 0.0, FORMAT=page_format(k_cache),
        M=config.long_rows, TILE=config.long_tile, UPCAST=upcast,
        **config.long_options(),
    )  # fmt: skip
