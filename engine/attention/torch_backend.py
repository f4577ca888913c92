"""Paged attention in plain torch: the fallback of every device and the reference of the fused backends.

Work is cut into products of one fixed size, [ROWS, D] x [D, TILE] and [ROWS, TILE] x [TILE, D + 1].  A matrix product of torch
gives a row other bits when the number of rows changes, and not when only its neighbours or the number of products does; with
the sizes fixed and the key tiles added up one after another from position 0, a row's result depends on its own sequence alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.kernels.kv_format import head_size_of, is_quantised, read_blocks, write_rows

ROWS = 16  # of a product: (query token, head of its group) pairs of one KV head
TILE = 128  # keys of a product; tile i holds positions i * TILE to (i + 1) * TILE
QUERY_BLOCK = 64  # query tokens of one sequence at a time, so that scores of a long prompt fit in memory


class TorchAttention:
    """Blocks are stored as [G, K, D] says, in order, those of 8 bits as kernels.kv_format has them.  The pages may hold anything, NaN too, where no token was written."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """As the protocol says; on CPU bit-equal for a query alone, in any batch and with any chunking of its prompt."""
        write_slots(k, v, cache, metadata.slot_mapping)
        out = torch.empty_like(q)
        block_size = cache.k.shape[2]
        starts = metadata.query_start.tolist()
        for s, seq_len in enumerate(metadata.seq_lens.tolist()):
            start, end = starts[s], starts[s + 1]
            if start == end:
                continue
            table = metadata.block_tables[s, : -(-seq_len // block_size)].long()
            first = first_position(seq_len - (end - start), spec.window)
            keys = gather(cache.k, table, first, seq_len, ones=False)
            values = gather(cache.v, table, first, seq_len, ones=True)
            for begin in range(start, end, QUERY_BLOCK):
                stop = min(begin + QUERY_BLOCK, end)
                position = seq_len - (end - begin)
                out[begin:stop] = attend(q[begin:stop], keys, values, position=position, first=first, spec=spec)
        return out


def write_slots(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    if is_quantised(cache.k.dtype):
        write_rows(cache.k, slot_mapping, k)
        write_rows(cache.v, slot_mapping, v)
        return
    block_size = cache.k.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping % block_size
    cache.k[blocks, :, offsets] = k.to(cache.k.dtype)
    cache.v[blocks, :, offsets] = v.to(cache.v.dtype)


def first_position(position: int, window: int | None) -> int:
    """Where the tile begins that holds the first key which a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // TILE * TILE


def gather(pages: Tensor, table: Tensor, first: int, seq_len: int, *, ones: bool) -> Tensor:
    """One sequence's cached rows from `first` on in whole tiles, float32: [G, tiles, TILE, D], with ones as column D if asked.

    What lies behind the last token becomes zero, since a NaN there would survive a weight of zero.
    """
    num_kv_heads, block_size, head_size = pages.shape[1], pages.shape[2], head_size_of(pages)
    first_block = first // block_size
    table = table[first_block:]
    rows = (read_blocks(pages, table) if is_quantised(pages.dtype) else pages[table]).transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    skip = first - first_block * block_size
    num_rows = seq_len - first
    num_tiles = -(-num_rows // TILE)
    tiles = pages.new_zeros(num_kv_heads, num_tiles * TILE, head_size + int(ones), dtype=torch.float32)
    tiles[:, :num_rows, :head_size] = rows[:, skip : skip + num_rows]
    if ones:
        tiles[:, :, head_size] = 1.0
    return tiles.view(num_kv_heads, num_tiles, TILE, head_size + int(ones))


def attend(q: Tensor, keys: Tensor, values: Tensor, *, position: int, first: int, spec: AttentionSpec) -> Tensor:
    """Queries at `position`, position + 1, … of one sequence against its tiles.  q [n, H, D]; returns [n, H, D]."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    num_tiles = min(keys.shape[1], -(-(position + num_tokens - first) // TILE))
    num_rows = num_tokens * group
    num_blocks = -(-num_rows // ROWS)

    rows = q.new_zeros(num_kv_heads, num_blocks * ROWS, head_size, dtype=torch.float32)
    rows[:, :num_rows] = q.view(num_tokens, num_kv_heads, group, head_size).transpose(0, 1).reshape(num_kv_heads, num_rows, -1)
    rows = rows.view(num_kv_heads, num_blocks, ROWS, head_size)
    visible = visible_keys(num_tokens, group, num_blocks, num_tiles, position=position, first=first, window=spec.window, like=q)

    out = torch.empty_like(rows)
    for block in range(num_blocks):
        left = rows[:, block, None].expand(-1, num_tiles, -1, -1)
        scores = torch.matmul(left, keys[:, :num_tiles].transpose(2, 3)) * spec.scale  # [G, tiles, ROWS, TILE]
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores.masked_fill_(~visible[block], -math.inf)
        highest = scores.amax(dim=(1, 3)).clamp_min(torch.finfo(torch.float32).min)  # [G, ROWS]; a filling row sees nothing
        sink = None if spec.sinks is None else sink_rows(spec.sinks, group, block)
        if sink is not None:
            highest = torch.maximum(highest, sink)
        weighted = torch.matmul(torch.exp(scores - highest[:, None, :, None]), values[:, :num_tiles])  # [G, tiles, ROWS, D + 1]
        # One tile after another: a sum over the axis would pair them in an order that depends on how many there are.
        total = weighted[:, 0].clone()
        for tile in range(1, num_tiles):
            total += weighted[:, tile]
        weight = total[..., head_size:]
        if sink is not None:
            weight = weight + torch.exp(sink - highest)[..., None]
        out[:, block] = total[..., :head_size] / weight
    out = out.view(num_kv_heads, -1, head_size)[:, :num_rows].view(num_kv_heads, num_tokens, group, head_size)
    return out.transpose(0, 1).reshape(num_tokens, num_heads, head_size).to(q.dtype)


def visible_keys(
    num_tokens: int, group: int, num_blocks: int, num_tiles: int, *, position: int, first: int, window: int | None, like: Tensor
) -> Tensor:
    """Which keys each row may see: [blocks, tiles, ROWS, TILE] bool; False throughout for the rows that only fill a block."""
    row = torch.arange(num_blocks * ROWS, device=like.device).view(num_blocks, 1, ROWS, 1)
    query = position + torch.div(row, group, rounding_mode="floor")
    key = first + torch.arange(num_tiles * TILE, device=like.device).view(1, num_tiles, 1, TILE)
    visible = (key <= query) & (row < num_tokens * group)
    if window is not None:
        visible &= key > query - window
    return visible


def sink_rows(sinks: Tensor, group: int, block: int) -> Tensor:
    """The sink of each row of a block, for every KV head: [G, ROWS] float32."""
    heads = torch.arange(block * ROWS, (block + 1) * ROWS, device=sinks.device) % group
    return sinks.float().view(-1, group)[:, heads]
