"""The Llama-shaped family on a CPU: the weights packed once, and a whole step in one call of the compiled operators."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, LayerCache
from pagestream.engine.attention.cpu_backend import paged_batch
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, plain
from pagestream.engine.models.cpu_linear import held
from pagestream.engine.models.progress import shown
from pagestream.kernels.cpu.ops import (
    PAGE_FORMATS,
    CPages,
    CpuOps,
    DecoderLayer,
    DecoderOp,
    DecoderSizes,
    GgufBlocks,
    PackedLinear,
)


class CpuDecoder:
    """A CausalLM.  Activations are float32; with bfloat16 weights they are rounded to bfloat16 at each product's entry.

    Every row of `forward` and `logits` depends on its own sequence alone, bit for bit.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        shape: ModelShape,
        ops: CpuOps,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Takes the weights over: each is packed and then let go, so that the model is never in memory twice.

        A weight may also be a GgufBlocks, gate_up and a tied head included: the tokens are those of the dequantised weight in
        bfloat16, read in a third of the time.  kv_dtype None: that of the norms, float32 where they are float16.
        Raises StartError for one that pages cannot have.
        """
        dtype = held(weights.final_norm).dtype
        self.kv_dtype = kv_dtype or dtype
        if self.kv_dtype not in PAGE_FORMATS:
            raise StartError(f"kv_cache_dtype {self.kv_dtype} is not supported on this CPU; use float32, bfloat16, int8 or fp8")
        self.ops = ops
        packed: list[PackedLinear] = []

        def pack(layer: LayerWeights, name: str, bias: Tensor | None = None, *, paired: bool = False) -> PackedLinear:
            linear = make(getattr(layer, name), bias, paired=paired)
            setattr(layer, name, None)
            return linear

        def make(weight: Tensor | GgufBlocks, bias: Tensor | None = None, *, paired: bool = False) -> PackedLinear:
            if isinstance(weight, GgufBlocks):
                packed.append(ops.quantised_linear(weight, bias, paired=paired))
            else:
                packed.append(ops.linear(held(weight), bias, paired=paired))
            return packed[-1]

        layers = [
            DecoderLayer(
                qkv=pack(layer, "qkv", layer.qkv_bias),
                o=pack(layer, "o", layer.o_bias),
                gate_up=pack(layer, "gate_up", paired=True),
                down=pack(layer, "down"),
                input_norm=layer.input_norm,
                post_norm=layer.post_norm,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                window=window,
            )
            for layer, window in shown(list(zip(weights.layers, spec.windows, strict=True)), "packing", "layer")
        ]
        tied = weights.head is weights.embedding
        self.head = make(weights.head)
        embedding = None if tied else held(plain(weights.embedding))
        self.op = DecoderOp(ops, sizes(spec), layers, spec.rotary.inv_freq, weights.final_norm, self.head, embedding)
        self._pages: tuple[Sequence[LayerCache], ctypes.Array[CPages]] | None = None  # of the cache that was used last
        num_bytes = sum(linear.num_bytes for linear in packed) + (0 if embedding is None else embedding.nbytes)
        self.shape = dataclasses.replace(shape, weight_bytes=num_bytes)

    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        if self._pages is None or self._pages[0] is not cache:
            self._pages = cache, self.op.pages([layer.k for layer in cache], [layer.v for layer in cache])
        return self.op(input_ids, self._pages[1], paged_batch(metadata))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.head(hidden) if out is None else out.copy_(self.head(hidden))

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `logits` would put first, the lowest of equals, and its score: [R] int64, [R] float32, NaN where a logit is."""
        return self.head.best(hidden)


def sizes(spec: DecoderSpec) -> DecoderSizes:
    return DecoderSizes(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        vocab_size=spec.vocab_size,
        rotary_dim=spec.rotary.rotary_dim,
        rms_norm_eps=spec.rms_norm_eps,
        attention_scale=spec.attention_scale,
        attention_factor=spec.rotary.attention_factor,
        activation=spec.activation,
    )
