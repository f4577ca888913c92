"""What core and the hall must know of a loaded model: sizes, never weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together that the positions allow
    num_layers: int
    num_kv_heads: int
    head_size: int
    eos_token_ids: frozenset[int]  # any of them ends a sequence
    num_parameters: int = 0
    weight_bytes: int = 0  # as held in memory
    weights_held_as: tuple[tuple[str, int], ...] = ()  # name of a format and how many weights it holds, most first
