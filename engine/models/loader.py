"""From a checkpoint's files to weights in memory, for the Llama-shaped family, in the form all devices start from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, LinearWeight
from pagestream.engine.models.checkpoint import Checkpoint
from pagestream.engine.models.decoder_config import decoder_spec, max_positions, weight_layout, with_defaults
from pagestream.engine.models.linear_blocks import HEAD_BITS, BlockReader, Quantise, unpacked
from pagestream.engine.models.progress import shown
from pagestream.engine.models.tensor_source import DummySource, TensorSource
from pagestream.kernels.block_quantise import quantise as quantise_in_torch
from pagestream.kernels.cpu.ops import GgufBlocks


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    spec: DecoderSpec
    weights: DecoderWeights
    shape: ModelShape


def load_decoder(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    reads_blocks: bool = False,
    quantise: Quantise = quantise_in_torch,
) -> LoadedDecoder:
    """Load a checkpoint of the Llama-shaped family.  Its weights come as `dtype` on `device`, linears fused.

    reads_blocks: there are operators for blocks of 4 and 8 bits, so linears come as blocks where the file or the checkpoint's
    `quantization` has them so; else such linears come unpacked, which are the same numbers.
    Raises StartError for a tensor that is missing or has another shape than the config says.
    """
    assert checkpoint.source is not None
    spec = decoder_spec(checkpoint.config, checkpoint.max_model_len)
    wants_blocks = checkpoint.bits is not None or checkpoint.quantization == "auto" and reads_blocks
    if isinstance(checkpoint.source, DummySource) and not wants_blocks:
        checkpoint.source.move_to(device)
    blocks = BlockReader(checkpoint.source, checkpoint.bits, quantise) if wants_blocks else None
    builder = WeightBuilder(
        checkpoint.source, spec, checkpoint.config, device=device, dtype=dtype, blocks=blocks, reads_blocks=reads_blocks
    )
    weights = builder.build()
    return LoadedDecoder(
        spec=spec,
        weights=weights,
        shape=ModelShape(
            vocab_size=spec.vocab_size,
            max_model_len=max_positions(with_defaults(checkpoint.config)),
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            eos_token_ids=checkpoint.eos_token_ids(spec.vocab_size),
            num_parameters=sum(builder.num_held.values()),
            weight_bytes=sum(builder.num_held.values()) * dtype.itemsize,
            weights_held_as=tuple(builder.num_held.most_common()),
        ),
    )


class WeightBuilder:
    """Puts a checkpoint's tensors where the decoder wants them, each copied and converted once."""

    def __init__(
        self,
        source: TensorSource,
        spec: DecoderSpec,
        config: dict[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: BlockReader | None = None,
        reads_blocks: bool = False,
    ):
        """blocks: linears go by it first; reads_blocks: they may stay what it gives."""
        self.source = source
        self.blocks = blocks
        self.reads_blocks = reads_blocks
        self.spec = spec
        self.layout = weight_layout(config)
        self.device = device
        self.dtype = dtype
        self.num_held: Counter[str] = Counter()  # weights by how they are held

    def build(self) -> DecoderWeights:
        spec = self.spec
        embedding = self.embedding()
        layers = [self.layer(f"model.layers.{number}.") for number in shown(range(spec.num_layers), "weights", "layer")]
        final_norm = self.one("model.norm.weight", spec.hidden_size)
        return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=self.head(embedding))

    def embedding(self) -> LinearWeight:
        """As blocks only where it is the head too: looking a token up alone is no operator's business."""
        name, shape = "model.embed_tokens.weight", (self.spec.vocab_size, self.spec.hidden_size)
        is_tied = self.layout.tied_head and not self.source.has("lm_head.weight")
        return self.head_linear(name, *shape) if is_tied else self.one(name, *shape)

    def head(self, embedding: LinearWeight) -> LinearWeight:
        """A file that holds a head of its own is believed more than a config that calls it tied."""
        if self.layout.tied_head and not self.source.has("lm_head.weight"):
            return embedding
        head = self.head_linear("lm_head.weight", self.spec.vocab_size, self.spec.hidden_size)
        if isinstance(head, Tensor) and isinstance(embedding, Tensor) and self.layout.tied_head and torch.equal(head, embedding):
            self.num_held[self.plain_name] -= head.numel()
            return embedding
        return head

    def layer(self, prefix: str) -> LayerWeights:
        spec = self.spec
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        qkv_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up_sizes = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        return LayerWeights(
            input_norm=self.one(prefix + "input_layernorm.weight", spec.hidden_size),
            qkv=self.fused_linear(attention, "qkv_proj", qkv_sizes),
            qkv_bias=self.fused(attention, "qkv_proj", qkv_sizes, "bias") if self.layout.qkv_bias else None,
            q_norm=self.one(attention + "q_norm.weight", spec.head_size) if self.layout.qk_norm else None,
            k_norm=self.one(attention + "k_norm.weight", spec.head_size) if self.layout.qk_norm else None,
            o=self.linear(attention + "o_proj.weight", spec.hidden_size, q_size),
            o_bias=self.one(attention + "o_proj.bias", spec.hidden_size) if self.layout.o_bias else None,
            post_norm=self.one(prefix + "post_attention_layernorm.weight", spec.hidden_size),
            gate_up=self.fused_linear(mlp, "gate_up_proj", gate_up_sizes),
            down=self.linear(mlp + "down_proj.weight", spec.hidden_size, spec.intermediate_size),
        )

    @property
    def plain_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def one(self, name: str, *shape: int) -> Tensor:
        tensor = self.source.load(name, shape)
        self.num_held[self.plain_name] += tensor.numel()
        # copy: what the source gave may be a view of the file, which would stay mapped and could not be written to.
        return tensor.to(self.dtype).to(device=self.device, copy=tensor.dtype == self.dtype).contiguous()

    def linear(self, name: str, *shape: int) -> LinearWeight:
        blocks = self.blocks.linear(name, shape, self.blocks.bits) if self.blocks is not None else None
        return self.one(name, *shape) if blocks is None else self.held(blocks)

    def head_linear(self, name: str, *shape: int) -> LinearWeight:
        bits = HEAD_BITS if self.blocks is not None and self.blocks.bits is not None else None
        blocks = self.blocks.linear(name, shape, bits) if self.blocks is not None else None
        return self.one(name, *shape) if blocks is None else self.held(blocks)

    def fused_linear(self, prefix: str, whole: str, sizes: dict[str, int]) -> LinearWeight:
        """The parts below one another, as blocks where all of them can be of one kind."""
        columns = self.spec.hidden_size
        if self.blocks is not None:
            is_whole = self.source.has(f"{prefix}{whole}.weight")
            parts = {whole: sum(sizes.values())} if is_whole else sizes
            blocks = self.blocks.stacked({f"{prefix}{name}.weight": size for name, size in parts.items()}, columns)
            if blocks is not None:
                return self.held(blocks)
        return self.fused(prefix, whole, sizes, "weight", columns)

    def held(self, blocks: GgufBlocks) -> LinearWeight:
        if self.reads_blocks:
            self.num_held[blocks.kind] += blocks.n * blocks.k
            return blocks
        self.num_held[f"{blocks.kind} in {self.plain_name}"] += blocks.n * blocks.k
        return unpacked(blocks, self.dtype).to(self.device)

    def fused(self, prefix: str, whole: str, sizes: dict[str, int], kind: str, *columns: int) -> Tensor:
        """The parts below one another, in the order of `sizes`; some checkpoints hold them so already."""
        num_rows = sum(sizes.values())
        if self.source.has(f"{prefix}{whole}.{kind}"):
            return self.one(f"{prefix}{whole}.{kind}", num_rows, *columns)
        parts = [self.source.load(f"{prefix}{name}.{kind}", (size, *columns)) for name, size in sizes.items()]
        target = torch.empty(num_rows, *columns, dtype=self.dtype, device=self.device)
        for part, slot in zip(parts, torch.split(target, list(sizes.values())), strict=True):
            slot.copy_(part)
        self.num_held[self.plain_name] += target.numel()
        return target
