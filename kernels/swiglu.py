"""The gated activation of an MLP: act(gate) * up.

Shapes:  gate_up [T, 2 F], gate before up; y [T, F].
Floor:   reads 2 F and writes F elements per token: 6 F bytes in 16 bit; about 10 FLOPs per element, so the bytes decide.
Source:  Shazeer 2020, GLU Variants Improve Transformer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate_up_ptr, y_ptr, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(gate_up_ptr + row * 2 * F + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + cols, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), which cannot overflow into a NaN.
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        acted = gate / (1.0 + tl.exp(-2.0 * z))
    else:
        acted = gate / (1.0 + tl.exp(-gate))
    # Rounded before the product, as transformers does.
    acted = acted.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * F + cols, acted * up, mask=inside)


def swiglu(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """act(gate) * up for each token.

    Shapes:  gate_up [T, 2 F] contiguous.  Returns [T, F], dtype of gate_up.
    Numbers: in float32.
    Raises:  ValueError on an activation other than silu and gelu_tanh, and on rows that are not contiguous.
    Oracle:  kernels.reference.swiglu
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation must be silu or gelu_tanh, not {activation}")
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    num_tokens, width = gate_up.shape
    size = width // 2
    y = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _swiglu_kernel[(num_tokens, triton.cdiv(size, BLOCK))](gate_up, y, F=size, BLOCK=BLOCK, GELU=activation == "gelu_tanh")
    return y
