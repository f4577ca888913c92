"""Keeps the rows of a transformers model independent of one another on a CPU (see linear.py for why they are not)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pagestream.engine.models.linear import FixedRowsLinear, LinearMakers, MakeLinear, gelu, gelu_tanh, sigmoid, silu, softplus


class PackedLinear(nn.Module):
    """In place of an nn.Linear: the same function, its weight held by whoever made it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, make_linear: MakeLinear):
        super().__init__()
        self.compute = make_linear(weight, bias)
        self.weight = nn.Parameter(weight.to("meta"), requires_grad=False)  # models ask for its dtype and shape

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of an nn.Linear or of GPT-2's transposed one, as a view; None for any other module."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module.weight.detach()
    return module.weight.detach().t() if type(module) is Conv1D else None


def replace_linears(model: nn.Module, linears: LinearMakers, head: nn.Module | None = None) -> int:
    """Put layers of ours in place of every linear; returns how many there were.  head: the one that scores the vocabulary."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = linear_weight(child)
            if weight is None:
                continue
            bias = dict(child.named_parameters(recurse=False)).get("bias")
            make = linears.make_head if child is head else linears.make
            setattr(parent, name, PackedLinear(weight.contiguous(), None if bias is None else bias.detach(), make))
            num_replaced += 1
    return num_replaced


def fixed_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return FixedRowsLinear(weight, bias)(x)


def fixed_rows_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Only a product with a matrix has rows of tokens; products of batches of matrices are left to torch."""
    return FixedRowsLinear(y.t(), None)(x) if x.ndim >= 2 and y.ndim == 2 else torch.matmul(x, y)


def fixed_rows_bmm(x: Tensor, y: Tensor) -> Tensor:
    """A mixture whose experts all read all tokens: each expert's rows by its own matrix."""
    return torch.stack([FixedRowsLinear(matrix.t(), None)(rows) for rows, matrix in zip(x, y, strict=True)])


def row_independent_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return gelu_tanh(x) if approximate == "tanh" else gelu(x)


def row_independent_silu(x: Tensor, inplace: bool = False) -> Tensor:
    return silu(x)


def row_independent_rsqrt(x: Tensor) -> Tensor:
    return (1.0 / torch.sqrt(x.float())).to(x.dtype)


class RowIndependent(TorchFunctionMode):
    """While active, the functions of torch whose rows depend on their company are computed by ours.

    Reaches what `replace_linears` does not: routers and experts of a mixture, activations called as functions.
    """

    REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
        F.linear: fixed_rows_linear,
        torch.matmul: fixed_rows_matmul,
        torch.mm: fixed_rows_matmul,
        Tensor.matmul: fixed_rows_matmul,
        Tensor.__matmul__: fixed_rows_matmul,
        torch.bmm: fixed_rows_bmm,
        Tensor.bmm: fixed_rows_bmm,
        F.silu: row_independent_silu,
        F.gelu: row_independent_gelu,
        F.sigmoid: sigmoid,
        torch.sigmoid: sigmoid,
        Tensor.sigmoid: sigmoid,
        F.softplus: softplus,
        torch.rsqrt: row_independent_rsqrt,
        Tensor.rsqrt: row_independent_rsqrt,
    }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.REPLACED.get(func, func)(*args, **(kwargs or {}))
