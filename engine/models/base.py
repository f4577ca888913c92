"""What a model is to the runner, and the weights of the Llama-shaped family in the form that every device starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, LayerCache
from pagestream.engine.core.model_shape import ModelShape
from pagestream.kernels.cpu.ops import GgufBlocks

# A linear's weight [out, in], or the same as a GGUF file stores it, for operators that read it so.
LinearWeight = Tensor | GgufBlocks


def plain(weight: LinearWeight) -> Tensor:
    """The weight as a tensor; raises TypeError for a file's blocks, which only some operators read."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{weight.kind} blocks where a tensor is needed")
    return weight


class CausalLM(Protocol):
    """A decoder that keeps its keys and values in pages that the runner owns."""

    shape: ModelShape
    kv_dtype: torch.dtype  # of the pages

    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        """Compute the step's tokens and write their K and V.  input_ids [T] int64; returns hidden states [T, hidden]."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score the vocabulary for some rows.  hidden [R, hidden]; returns [R, V] float32, contiguous, the caller's to change.

        out: where to put them, instead of a tensor of their own.
        """


def as_logits(scores: Tensor, out: Tensor | None) -> Tensor:
    """A head's product as `CausalLM.logits` returns it, converted in the one pass that also puts it there."""
    return scores.to(torch.float32, copy=True).contiguous() if out is None else out.copy_(scores)


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding in the half-split layout: dimension i turns with dimension i + rotary_dim / 2."""

    inv_freq: Tensor  # [rotary_dim / 2] float32
    rotary_dim: int  # of each head; the rest is passed through
    attention_factor: float = 1.0  # multiplies cos and sin (YaRN, LongRoPE)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The Llama-shaped family, driven by the config alone: RMSNorm, rotary, grouped-query attention, gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    rotary: RotarySpec
    attention_scale: float
    windows: tuple[int | None, ...]  # one per layer; None: full attention
    activation: str = "silu"  # silu | gelu_tanh


@dataclass(slots=True)
class LayerWeights:
    """One layer; linears are [out, in] as checkpoints have them, Q before K before V and gate before up.

    A slot is set to None once a device has taken the weight over in a layout of its own.
    """

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # [(H + 2 G) D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D], RMSNorm of each head before rotary
    k_norm: Tensor | None
    o: LinearWeight  # [hidden, H D]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight  # [hidden, intermediate]


@dataclass(slots=True)
class DecoderWeights:
    embedding: LinearWeight  # [V, hidden]; blocks only where the head is the same
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: LinearWeight  # [V, hidden]; the same object as embedding where they are tied
