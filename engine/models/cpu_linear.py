"""Packed linears of the compiled CPU operators, one at a time, for models whose other parts are plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream.engine.models.linear import Linear
from pagestream.kernels.cpu.ops import CpuOps, GgufBlocks, PackedLinear


class CpuLinearMaker:
    """A MakeLinear: float32 and bfloat16 weights are held as they are, others as float32."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return CpuLinear(self.ops.linear(held(weight), bias))


class CpuLinear:
    """y = x W^T + b over [..., in], in the dtype of x."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        out = self.packed(x.reshape(-1, self.packed.k))
        return out.view(*x.shape[:-1], self.packed.n).to(x.dtype)


def hold_packed(ops: CpuOps, blocks: GgufBlocks, bias: Tensor | None) -> Linear:
    return CpuLinear(ops.quantised_linear(blocks, bias))


def held(weight: Tensor) -> Tensor:
    """A weight in a type that the operators hold: float16 has no products of its own, and bfloat16 would round it."""
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
