"""Floats to GGUF blocks of 32 in plain torch: on a GPU, and on a CPU without compiled operators.

Shapes:  weight [N, K]; a block is 32 weights along K with scales of 16 bits.
Q4_1:    w = scale * q + minimum, q of 4 bits.  Its minimum costs nothing where it is read: all packed 4-bit layouts have room for
         one.  On normally distributed weights its error is a tenth lower than that of Q4_0, whose zero is one of the 16 values.
Q8_0:    w = scale * q, q in [-127, 127], the scale from the largest magnitude.
Numbers: all in float32, each operation by itself and sums of 32 by halves, so that kernels/cpu/quantise.h gives the same bits.
Source:  GGUF's block formats; Frantar et al. 2022, GPTQ, appendix, for the gain of fitting scales to what is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream.kernels.cpu.ops import NOT_HELD, GgufBlocks, empty_blocks

GROUP = 32
CHUNK_GROUPS = 1 << 17  # at a time: what lies in between is some twenty times as large
MARGINS = (0.0, 0.05)  # of a group's range, cut off at both ends to start from
NUM_FITS = 2  # from each start; more gain less than a hundredth


def quantise(weight: Tensor, kind: str) -> GgufBlocks:
    """The blocks nearest to a weight of any float type, on its device.

    Raises ValueError for a kind or a number of columns that has no blocks, and for weights that no block holds.
    """
    blocks = empty_blocks(weight, kind)
    groups = weight.reshape(-1, GROUP)
    out = blocks.data.view(len(groups), -1)
    for part, target in zip(groups.split(CHUNK_GROUPS), out.split(CHUNK_GROUPS), strict=True):
        columns = part.float().t().contiguous()
        if not (q4_1(columns, target) if kind == "Q4_1" else q8_0(columns, target)):
            raise ValueError(NOT_HELD)
    return blocks


@dataclass(frozen=True, slots=True)
class Fit:
    """[groups] each, and the quants [32, groups]."""

    scale: Tensor
    minimum: Tensor
    quants: Tensor
    error: Tensor

    def or_better(self, other: Fit) -> Fit:
        closer = other.error < self.error
        return Fit(
            torch.where(closer, other.scale, self.scale),
            torch.where(closer, other.minimum, self.minimum),
            torch.where(closer, other.quants, self.quants),
            torch.where(closer, other.error, self.error),
        )


def q4_1(w: Tensor, out: Tensor) -> bool:
    """w [32, groups]; out [groups, 20].  False if some group can't be held."""
    low, high = w.amin(0), w.amax(0)
    best: Fit | None = None
    for margin in MARGINS:
        cut = (high - low) * margin
        scale, minimum = half((high - low - 2.0 * cut) * (1.0 / 15.0)), half(low + cut)
        for _ in range(NUM_FITS + 1):
            rest = w - minimum
            fit = nearest(rest, scale, minimum)
            best = fit if best is None else best.or_better(fit)
            scale, minimum = least_squares(fit, rest)
    assert best is not None
    quants = best.quants.to(torch.uint8)
    out[:, :2], out[:, 2:4] = as_bytes(best.scale), as_bytes(best.minimum)
    out[:, 4:] = (quants[:16] | quants[16:] << 4).t()
    return bool(best.error.isfinite().all())


def nearest(rest: Tensor, scale: Tensor, minimum: Tensor) -> Fit:
    quants = (rest * inverse(scale)).clamp_(0.0, 15.0).round_()
    return Fit(scale, minimum, quants, total((quants * scale - rest).square()))


def least_squares(fit: Fit, rest: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum that suit a fit's quants best."""
    q = fit.quants
    sum_q, sum_rest, sum_qq, sum_q_rest = total(q), total(rest), total(q * q), total(q * rest)
    spread = 32.0 * sum_qq - sum_q * sum_q
    slope = torch.where(spread > 0.0, (32.0 * sum_q_rest - sum_q * sum_rest) / spread, fit.scale)
    return half(slope), half(fit.minimum + (sum_rest - slope * sum_q) * 0.03125)


def q8_0(w: Tensor, out: Tensor) -> bool:
    """w [32, groups]; out [groups, 34].  False if some group can't be held."""
    magnitudes = w.abs()
    scale = half(magnitudes.amax(0) * (1.0 / 127.0))
    out[:, :2] = as_bytes(scale)
    quants = (w * inverse(scale)).clamp_(-127.0, 127.0).round_()
    out[:, 2:] = quants.to(torch.int8).t().contiguous().view(torch.uint8)
    return bool((total(magnitudes) + scale).isfinite().all())


def half(x: Tensor) -> Tensor:
    return x.to(torch.float16).float()


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0.0, 1.0 / scale, 0.0)


def as_bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16)[:, None].view(torch.uint8)


def total(x: Tensor) -> Tensor:
    """Over the first axis, by halves."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]
