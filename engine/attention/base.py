"""What attention needs to know of a step, and what it promises.  Nothing else in the engine knows which backend runs.

Shape letters: T tokens of the step, S sequences, H query heads, G KV heads, D head size, B blocks, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The ragged batch of one step; sequence s owns the query tokens query_start[s] to query_start[s + 1].

    Token t of the step is written to slot slot_mapping[t] = block_id * K + offset and attends to all positions up to its own.
    Rows of block_tables are valid as far as seq_lens needs them; the rest is 0.
    """

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    query_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32, tokens in the cache after this step
    block_tables: Tensor  # [S, max_blocks] int32
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages, [B, G, K, D] each; those of 8 bits are wider by their scales (kernels.kv_format).

    Block ids are the first axis for everybody (copies and swaps move whole blocks); the order of the elements inside one
    block and head is private to the backend that writes and reads them.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention is, apart from its inputs."""

    scale: float
    window: int | None = None  # a query sees itself and the window - 1 tokens before; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [H] float32, one more logit in each softmax, with no value


class AttentionBackend(Protocol):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Write K and V of the step's tokens into their slots, then let every query attend to its own sequence.

        Shapes:  q [T, H, D]; k, v [T, G, D]; returns [T, H, D] in the dtype of q.
        Numbers: scores and sums in float32; each row's result depends on its own sequence alone, never on its neighbours.
        """
