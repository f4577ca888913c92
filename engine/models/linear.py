"""Linear layers and activations whose rows do not depend on their company, in plain torch.

Why not F.linear and F.silu on a CPU: a matrix product picks its kernel by the number of rows, and an elementwise function
computes the last few elements of a thread's share by a scalar routine whose exp differs from the vector one in the last bit.
Both give a token other bits in another batch.  Measured on torch 2.13 (AVX-512, float32, float16 and bfloat16, 1 to 3 threads):
products of a fixed size give a row the same bits wherever in it the row stands, and torch.exp, log1p, tanh, erf and sqrt, unlike
silu, sigmoid, gelu and softplus, give an element the same bits wherever it stands.  The tests of this room hold both to that.

On a GPU the plain operations are taken; there the promise is not made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # [..., in] to [..., out]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # weight [out, in] and bias [out]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LinearMakers:
    """For a model's linears, and for the one that scores the vocabulary."""

    make: MakeLinear
    make_head: MakeLinear


ROWS = 16  # of one product; at 16 a single token costs little more than it would alone


class FixedRowsLinear:
    """y = x W^T + b, always computed ROWS rows at a time; what is missing in the last product is filled with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        filled = -(-num_rows // ROWS) * ROWS
        if filled != num_rows:
            rows = torch.cat([rows, rows.new_zeros(filled - num_rows, rows.shape[1])])
        out = torch.cat([F.linear(part, self.weight, self.bias) for part in rows.split(ROWS)])
        return out[:num_rows].view(*x.shape[:-1], self.weight.shape[0])


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return functools.partial(F.linear, weight=weight, bias=bias)


def linear_maker(device: torch.device) -> MakeLinear:
    """What a device without packed linears of its own uses."""
    return FixedRowsLinear if device.type == "cpu" else plain_linear


def silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    wide = x.float() * beta
    return torch.where(wide > threshold, x.float(), torch.log1p(torch.exp(wide.clamp(max=threshold))) / beta).to(x.dtype)


def activation(name: str, device: torch.device) -> Activation:
    """By the names of DecoderSpec."""
    on_cpu: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh}
    elsewhere: dict[str, Activation] = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
    return on_cpu[name] if device.type == "cpu" else elsewhere[name]
