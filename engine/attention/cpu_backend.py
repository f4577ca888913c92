"""Paged attention by the compiled CPU operators."""

from __future__ import annotations

from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.kernels.cpu.ops import CpuOps, PagedBatch


class CpuAttentionBackend:
    """An AttentionBackend for such pages as kernels.cpu.ops.supports_pages names, whatever the dtype of q, k and v."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        out = self.ops.paged_attention(
            q,
            k,
            v,
            cache.k,
            cache.v,
            paged_batch(metadata),
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=spec.sinks,
        )
        return out.to(q.dtype)


def paged_batch(metadata: AttentionMetadata) -> PagedBatch:
    """A step as the operators take it."""
    return PagedBatch(
        positions=metadata.positions,
        slot_mapping=metadata.slot_mapping,
        query_start=metadata.query_start,
        seq_lens=metadata.seq_lens,
        block_tables=metadata.block_tables,
    )
