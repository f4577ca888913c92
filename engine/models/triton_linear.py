"""Linears of 4 and 8 bits on a GPU, in blocks as GGUF files hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagestream.engine.models.linear import Linear, linear_maker
from pagestream.kernels.cpu.ops import GGUF_KINDS, GgufBlocks
from pagestream.kernels.quant_matmul import PIECE, QuantisedWeight, pack, quant_matmul, unpack

GROUP = 32  # weights of a block
MOST_ROWS = 64  # beyond them the matrix unit on dequantised weights is faster than the kernel, which reads the codes for every 16 rows


class BlocksLinear:
    """y = x W^T + b.  Few rows by the kernel that reads the codes; many by a product with the weight unpacked for that call."""

    def __init__(self, blocks: GgufBlocks, bias: Tensor | None, device: torch.device, dtype: torch.dtype):
        """Raises ValueError for a number of columns that the kernel can't take; see `fits`."""
        self._bias = bias
        self._dtype = dtype
        self._weight: QuantisedWeight = pack(**split_blocks(blocks, device))
        self._make_linear = linear_maker(device)
        self._upcast = device.type == "cpu" and dtype == torch.bfloat16  # the interpreter multiplies the bits of bfloat16
        self.num_bytes = sum(part.nbytes for part in (self._weight.pieces, self._weight.factors))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] > MOST_ROWS:
            return self._make_linear(unpack(self._weight, self._dtype), self._bias)(x)
        y = quant_matmul(rows, self._weight, upcast=self._upcast).view(*x.shape[:-1], -1)
        return y if self._bias is None else y + self._bias

    def rows(self, input_ids: Tensor) -> Tensor:
        """The weight's own rows, as an embedding gives them.  input_ids [T]; returns [T, K]."""
        return unpack(self._weight, self._dtype, input_ids)


def hold_blocks(blocks: GgufBlocks, bias: Tensor | None, *, device: torch.device, dtype: torch.dtype) -> Linear:
    """As blocks where the kernel takes so many columns, else as the tensor that they are."""
    if fits(blocks):
        return BlocksLinear(blocks, bias, device, dtype)
    return linear_maker(device)(as_tensor(blocks, device, dtype), bias)


def fits(blocks: GgufBlocks) -> bool:
    """Whether the kernel takes so many columns."""
    return columns_of(blocks) % PIECE == 0


def as_tensor(blocks: GgufBlocks, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weight as floats, [N, K]."""
    parts = split_blocks(blocks, device)
    codes = parts["codes"].view(*parts["scales"].shape, GROUP).float()
    return torch.addcmul(parts["minimums"][..., None].float(), codes, parts["scales"][..., None].float()).to(dtype).flatten(1)


def columns_of(blocks: GgufBlocks) -> int:
    return blocks.data.shape[1] // GGUF_KINDS[blocks.kind].block_bytes * GROUP


def split_blocks(blocks: GgufBlocks, device: torch.device) -> dict[str, Any]:
    """The arguments of kernels.quant_matmul.pack: codes [N, K], scales and minimums [N, K / 32]."""
    stored = blocks.data.to(device)
    has_minimum = blocks.kind == "Q4_1"
    is_byte = blocks.kind == "Q8_0"
    head_bytes = 4 if has_minimum else 2
    width = head_bytes + (GROUP if is_byte else GROUP // 2)
    rows = stored.view(stored.shape[0], -1, width)
    scales = rows[..., :2].contiguous().view(torch.float16)[..., 0]
    codes = rows[..., head_bytes:]
    if is_byte:
        codes, minimums = codes ^ 128, -128 * scales.float()  # signed codes, stored plus 128
    else:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        minimums = rows[..., 2:4].contiguous().view(torch.float16)[..., 0] if has_minimum else -8 * scales
    return {
        "codes": codes.flatten(1), "scales": scales.contiguous(), "minimums": minimums.to(scales.dtype).contiguous(),
        "bits": 8 if is_byte else 4, "group": GROUP,
    }  # fmt: skip
