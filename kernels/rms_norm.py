"""Residual add and RMSNorm in one pass.

Shapes:  x, residual [T, N] (N hidden size), weight [N].
Floor:   reads x and residual, writes residual and y: 8 N bytes per token in 16 bit, 4 N without the residual; 4 FLOPs per
         element, so the bytes decide.  Below about 64 tokens a launch costs more than the bytes.
Source:  Zhang & Sennrich 2019, Root Mean Square Layer Normalization.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    x = tl.load(x_ptr + row * X_STRIDE + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the sum as it is stored, so that fused and unfused layers give the same bits.
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * N + cols, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    # Rounded before the weight is applied, as transformers does.
    normed = (x * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + cols, normed * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Normalise each row of x, or of residual + x; the residual becomes that sum, in place.

    Shapes:  x [T, N] with contiguous rows, weight [N], residual [T, N] contiguous.  Returns [T, N] in the dtype of x.
    Numbers: sums in float32; every row by itself.
    Raises:  ValueError on a row that is not contiguous.
    Oracle:  kernels.reference.rms_norm
    """
    num_tokens, size = x.shape
    if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError("rows must be contiguous")
    y = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x, x if residual is None else residual, weight, y, eps,
            # One row has no stride: torch may report any, and each would be a kernel of its own.
            N=size, X_STRIDE=x.stride(0) if num_tokens > 1 else size, BLOCK=block,
            HAS_RESIDUAL=residual is not None, num_warps=min(8, max(1, block // 512)),
        )  # fmt: skip
    return y
