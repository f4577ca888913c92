"""The Llama-shaped family on a GPU: the layers of decoder.py, with all that lies between the linears in Triton kernels.

A layer is four linears and five kernels: norm, rotary with the write of K and V, attention, residual add with norm, gated
activation; the residual is kept in one tensor that the norms add to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.attention.triton_backend import TritonAttention
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, LinearWeight, as_logits
from pagestream.engine.models.linear import Linear, linear_maker
from pagestream.engine.models.triton_linear import BlocksLinear, as_tensor, hold_blocks
from pagestream.kernels.reshape_and_cache import rotary_table
from pagestream.kernels.rms_norm import rms_norm
from pagestream.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class TritonLayer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention: AttentionSpec
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class TritonDecoder:
    """A CausalLM.  Attention and norms give a row its own bits in any company; the linears do as far as cuBLAS does."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        shape: ModelShape,
        attention: TritonAttention,
        *,
        max_model_len: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        """Takes the weights over; linears may be GgufBlocks.  max_model_len bounds the rotary table; None: the model's own."""
        self._spec = spec
        self._attention = attention
        self._final_norm = weights.final_norm
        self._device, self._dtype = weights.final_norm.device, weights.final_norm.dtype
        self._num_bytes = 0
        self.kv_dtype = kv_dtype or self._dtype
        num_positions = min(max_model_len or shape.max_model_len, shape.max_model_len)
        self._table = rotary_table(spec.rotary.inv_freq, num_positions, spec.rotary.attention_factor).to(self._device)
        self._layers = [self._layer(layer, window) for layer, window in zip(weights.layers, spec.windows, strict=True)]
        self._head = self._linear(weights.head)
        if weights.head is weights.embedding and isinstance(self._head, BlocksLinear):
            self._embed: Callable[[Tensor], Tensor] = self._head.rows
        else:
            embedding = self._as_tensor(weights.embedding)
            self._num_bytes += 0 if embedding is weights.head else embedding.nbytes
            self._embed = functools.partial(F.embedding, weight=embedding)
        self.shape = dataclasses.replace(shape, weight_bytes=self._num_bytes)

    def _layer(self, weights: LayerWeights, window: int | None) -> TritonLayer:
        return TritonLayer(
            input_norm=weights.input_norm,
            qkv=self._linear(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            attention=AttentionSpec(scale=self._spec.attention_scale, window=window),
            o=self._linear(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
        )

    def _linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Tensor):
            self._num_bytes += weight.nbytes
            return linear_maker(self._device)(weight, bias)
        linear = hold_blocks(weight, bias, device=self._device, dtype=self._dtype)
        as_tensor_bytes = weight.n * weight.k * self._dtype.itemsize
        self._num_bytes += linear.num_bytes if isinstance(linear, BlocksLinear) else as_tensor_bytes
        return linear

    def _as_tensor(self, weight: LinearWeight) -> Tensor:
        return weight if isinstance(weight, Tensor) else as_tensor(weight, self._device, self._dtype)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        spec, eps = self._spec, self._spec.rms_norm_eps
        num_tokens = input_ids.shape[0]
        residual = self._embed(input_ids)
        x = rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for layer, layer_cache, next_norm in zip(self._layers, cache, next_norms, strict=True):
            heads = layer.qkv(x).view(num_tokens, -1, spec.head_size)
            q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            out = self._attention.rotate_and_forward(
                q, k, v, layer_cache, metadata, layer.attention, table=self._table, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps
            )
            x = rms_norm(layer.o(out.view(num_tokens, -1)), layer.post_norm, eps, residual=residual)
            x = layer.down(swiglu(layer.gate_up(x), activation=spec.activation))
            x = rms_norm(x, next_norm, eps, residual=residual)
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return as_logits(self._head(hidden), out)
