"""How GGUF files store weights, and how stored blocks become floats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError


class GgmlType(IntEnum):
    """How a tensor's elements are stored; the numbers are the file format's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class BlockLayout:
    num_weights: int
    num_bytes: int


BLOCK_LAYOUTS = {
    GgmlType.F32: BlockLayout(1, 4),
    GgmlType.F16: BlockLayout(1, 2),
    GgmlType.BF16: BlockLayout(1, 2),
    GgmlType.Q4_0: BlockLayout(32, 18),
    GgmlType.Q4_1: BlockLayout(32, 20),
    GgmlType.Q5_0: BlockLayout(32, 22),
    GgmlType.Q5_1: BlockLayout(32, 24),
    GgmlType.Q8_0: BlockLayout(32, 34),
    GgmlType.Q2_K: BlockLayout(256, 84),
    GgmlType.Q3_K: BlockLayout(256, 110),
    GgmlType.Q4_K: BlockLayout(256, 144),
    GgmlType.Q5_K: BlockLayout(256, 176),
    GgmlType.Q6_K: BlockLayout(256, 210),
    GgmlType.IQ2_XXS: BlockLayout(256, 66),
    GgmlType.IQ2_XS: BlockLayout(256, 74),
    GgmlType.IQ3_XXS: BlockLayout(256, 98),
    GgmlType.IQ1_S: BlockLayout(256, 50),
    GgmlType.IQ4_NL: BlockLayout(32, 18),
    GgmlType.IQ3_S: BlockLayout(256, 110),
    GgmlType.IQ2_S: BlockLayout(256, 82),
    GgmlType.IQ4_XS: BlockLayout(256, 136),
    GgmlType.IQ1_M: BlockLayout(256, 56),
    GgmlType.TQ1_0: BlockLayout(256, 54),
    GgmlType.TQ2_0: BlockLayout(256, 66),
    GgmlType.MXFP4: BlockLayout(32, 17),
}


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A tensor's bytes as they stand in the file: uint8 [rows, bytes of a row], a read-only view of the mapping."""

    data: Tensor
    type: GgmlType


def dequantize(blocks: RawBlocks) -> Tensor:
    """[rows, weights of a row]: float32, or float16 / bfloat16 where that is what is stored.

    Numbers: the products and sums in float32, in the order of the format's definition, so equal bit by bit to gguf.quants.
    """
    data = blocks.data
    if blocks.type in UNPACKERS:
        layout = BLOCK_LAYOUTS[blocks.type]
        num_rows = data.shape[0]
        flat = UNPACKERS[blocks.type](data.reshape(-1, layout.num_bytes))
        return flat.view(num_rows, -1)
    if blocks.type in STORED_FLOATS:
        return data.view(STORED_FLOATS[blocks.type])
    from gguf import GGMLQuantizationType, quants

    try:
        return torch.from_numpy(quants.dequantize(data.numpy(), GGMLQuantizationType(blocks.type)))
    except (ValueError, NotImplementedError) as error:
        raise StartError(f"weights stored as {blocks.type.name} can't be unpacked by the installed gguf package") from error


def half_column(blocks: Tensor, start: int) -> Tensor:
    """Two bytes of every block as a float16, widened: [blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes to [blocks, 32] float32: the low halves of all bytes come before the high halves."""
    weights = torch.empty(packed.shape[0], 2, packed.shape[1])
    weights[:, 0] = packed & 15
    weights[:, 1] = packed >> 4
    return weights.view(packed.shape[0], -1)


def unpack_q4_0(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:]).sub_(8.0).mul_(half_column(blocks, 0))


def unpack_q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).mul_(half_column(blocks, 0)).add_(half_column(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(half_column(blocks, 0))


UNPACKERS = {GgmlType.Q4_0: unpack_q4_0, GgmlType.Q4_1: unpack_q4_1, GgmlType.Q8_0: unpack_q8_0}
STORED_FLOATS = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
