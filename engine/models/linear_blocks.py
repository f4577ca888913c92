"""Linears in blocks of 32: as a GGUF file stores them, or converted at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.gguf_blocks import GgmlType, RawBlocks, dequantize
from pagestream.engine.models.linear import Linear, linear_maker
from pagestream.engine.models.tensor_source import GgufSource, TensorSource
from pagestream.kernels.cpu.ops import GGUF_KINDS, GgufBlocks

Quantise = Callable[[Tensor, str], GgufBlocks]  # a weight [out, in] and a kind of blocks
HoldBlocks = Callable[[GgufBlocks, Tensor | None], Linear]  # with its bias

GROUP = 32  # weights of a block
BITS = {"int4": 4, "int8": 8}
KIND_OF_BITS = {4: "Q4_1", 8: "Q8_0"}
BITS_OF_KIND = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
BYTES_OF_KIND = {kind: GGUF_KINDS[kind].block_bytes / GROUP for kind in BITS_OF_KIND}  # of a weight
HEAD_BITS = 8  # of a converted head, and of the embedding where they are one: what it is off by, it is off by in every logit


class BlockReader:
    """A checkpoint's linears as blocks.

    bits None: only what a GGUF file stores so, with its own bits.  Else everything comes in so many: what a file has in as few
    stays as it is, the rest is converted from what the checkpoint stores, not from the dtype that it is served with.
    """

    def __init__(self, source: TensorSource, bits: int | None, quantise: Quantise):
        self.source = source
        self.bits = bits
        self.quantise = quantise

    def linear(self, name: str, shape: tuple[int, ...], bits: int | None) -> GgufBlocks | None:
        """None where it is to be a tensor."""
        stored = self.source.blocks(name, shape) if isinstance(self.source, GgufSource) else None
        if bits is None or (stored is not None and BITS_OF_KIND[stored.kind] <= bits):
            return stored
        return self.converted(name, shape, bits)

    def stacked(self, sizes: Mapping[str, int], num_columns: int) -> GgufBlocks | None:
        """Several below one another, by name and number of rows; None where they are to be a tensor."""
        found = [self.linear(name, (size, num_columns), self.bits) for name, size in sizes.items()]
        parts = [part for part in found if part is not None]
        if len(parts) != len(found):
            return None
        if len({part.kind for part in parts}) > 1:
            if self.bits is None:
                return None
            if all(BITS_OF_KIND[part.kind] == 4 for part in parts):
                parts = [as_q4_1(part) for part in parts]
            else:
                parts = [self.converted(name, (size, num_columns), self.bits) for name, size in sizes.items()]
        return GgufBlocks(parts[0].kind, below_one_another([part.data for part in parts]))

    def converted(self, name: str, shape: tuple[int, ...], bits: int) -> GgufBlocks:
        weight = self.source.load(name, shape)
        try:
            return self.quantise(weight, KIND_OF_BITS[bits])
        except ValueError as error:
            raise StartError(f"the weights of {name} can't be held in {bits} bits: {error}") from error


def below_one_another(parts: list[Tensor]) -> Tensor:
    """On the GPU where some were converted there; what a file has itself still lies in it."""
    elsewhere = [part.device for part in parts if part.device.type != "cpu"]
    if elsewhere:
        return torch.cat([part.to(elsewhere[0]) for part in parts])
    # By numpy: torch shares such a copy out among threads, which costs ten times the copy where they must wait for a core.
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))


def as_q4_1(blocks: GgufBlocks) -> GgufBlocks:
    """The same weights with a minimum of their own: a Q4_0 block's is -8 times its scale."""
    if blocks.kind == "Q4_1":
        return blocks
    rows = blocks.data.view(blocks.n, -1, 18)
    minimums = (rows[..., :2].contiguous().view(torch.float16).float() * -8.0).to(torch.float16)
    return GgufBlocks("Q4_1", torch.cat((rows[..., :2], minimums.view(torch.uint8), rows[..., 2:]), dim=-1).flatten(1))


def unpacked(blocks: GgufBlocks, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor, each rounded once to `dtype`: the numbers that an operator which reads blocks multiplies with."""
    return dequantize(RawBlocks(blocks.data.cpu(), GgmlType[blocks.kind])).to(device=blocks.data.device, dtype=dtype)


@dataclass(frozen=True, slots=True)
class BlocksMaker:
    """A MakeLinear that converts a weight and gives the blocks to who multiplies with them."""

    quantise: Quantise
    bits: int
    hold: HoldBlocks

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.hold(self.quantise(weight, KIND_OF_BITS[self.bits]), bias)


def hold_unpacked(blocks: GgufBlocks, bias: Tensor | None, *, device: torch.device, dtype: torch.dtype) -> Linear:
    return linear_maker(device)(unpacked(blocks, dtype).to(device), bias)
