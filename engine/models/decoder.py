"""The Llama-shaped family in plain torch, driven by the spec alone: what runs on GPUs, and the reference of the fused CPU decoder.

Each layer:  h += o(attention(rotary(q), rotary(k), v))   with q, k, v from qkv(norm(h))
             h += down(act(gate) * up)                    with gate, up from gate_up(norm(h))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagestream.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, RotarySpec, as_logits, plain
from pagestream.engine.models.linear import Activation, Linear, MakeLinear, activation, linear_maker


class TorchDecoder:
    """A CausalLM.  On a CPU its rows are independent of one another as long as the linears and the attention given to it are."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        shape: ModelShape,
        attention: AttentionBackend,
        *,
        max_model_len: int | None = None,
        kv_dtype: torch.dtype | None = None,
        make_linear: MakeLinear | None = None,
    ):
        """max_model_len bounds the rotary table, kv_dtype is that of the pages; None: the model's own of both."""
        self.embedding = plain(weights.embedding)
        device, dtype = self.embedding.device, self.embedding.dtype
        make_linear = make_linear or linear_maker(device)
        self.shape = shape
        self.kv_dtype = kv_dtype or dtype
        self.rotary = RotaryTable(spec.rotary, min(max_model_len or shape.max_model_len, shape.max_model_len), device, dtype)
        act = activation(spec.activation, device)
        self.layers = [
            DecoderLayer(
                norm=RMSNorm(layer.input_norm, spec.rms_norm_eps),
                attention=SelfAttention(spec, layer, spec.windows[number], attention, make_linear),
                post_norm=RMSNorm(layer.post_norm, spec.rms_norm_eps),
                mlp=GatedMLP(make_linear(plain(layer.gate_up), None), make_linear(plain(layer.down), None), act),
            )
            for number, layer in enumerate(weights.layers)
        ]
        self.final_norm = RMSNorm(weights.final_norm, spec.rms_norm_eps)
        self.head = make_linear(plain(weights.head), None)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        hidden = F.embedding(input_ids, self.embedding)
        rotation = self.rotary.at(metadata.positions)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = hidden + layer.attention(layer.norm(hidden), rotation, layer_cache, metadata)
            hidden = hidden + layer.mlp(layer.post_norm(hidden))
        return self.final_norm(hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return as_logits(self.head(hidden), out)


class RMSNorm:
    """x / rms(x) in float32, then times the weight in the model's dtype.  Source: Zhang and Sennrich 2019."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's tokens, [T, 1, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Turn dimension i of each head with dimension i + rotary_dim / 2; what is behind them stays.  x [T, heads, D]."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*turned, rest), dim=-1)


class RotaryTable:
    """cos and sin of every position that is served, computed once in float32 and held in the model's dtype."""

    def __init__(self, spec: RotarySpec, num_positions: int, device: torch.device, dtype: torch.dtype):
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * spec.inv_freq[None, :]
        self.cos = (angles.cos() * spec.attention_factor)[:, None].to(device=device, dtype=dtype)
        self.sin = (angles.sin() * spec.attention_factor)[:, None].to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> Rotation:
        return Rotation(cos=self.cos[positions], sin=self.sin[positions])


class SelfAttention:
    """Grouped-query attention over pages, with what the spec and the weights ask for: biases, norms of each head, a window."""

    def __init__(
        self, spec: DecoderSpec, weights: LayerWeights, window: int | None, backend: AttentionBackend, make_linear: MakeLinear
    ):
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_size = spec.head_size
        self.qkv = make_linear(plain(weights.qkv), weights.qkv_bias)
        self.o = make_linear(plain(weights.o), weights.o_bias)
        self.q_norm = None if weights.q_norm is None else RMSNorm(weights.q_norm, spec.rms_norm_eps)
        self.k_norm = None if weights.k_norm is None else RMSNorm(weights.k_norm, spec.rms_norm_eps)
        self.backend = backend
        self.spec = AttentionSpec(scale=spec.attention_scale, window=window)

    def __call__(self, x: Tensor, rotation: Rotation, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        num_tokens = x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, self.head_size)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.backend.forward(rotation.apply(q), rotation.apply(k), v, cache, metadata, self.spec)
        return self.o(out.reshape(num_tokens, -1))


class GatedMLP:
    def __init__(self, gate_up: Linear, down: Linear, act: Activation):
        self.gate_up = gate_up
        self.down = down
        self.act = act

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    norm: RMSNorm
    attention: SelfAttention
    post_norm: RMSNorm
    mlp: GatedMLP
