"""Bit operations on tensors of 16-bit words, two words at a time: what 8-bit and 4-bit codes are taken apart with.

A GPU's registers have 32 bits, and the matrix units want two 16-bit numbers in each; the compiler takes them apart, and packs them
again.  On NVIDIA an instruction given by name keeps them together: one for an `and` with an `or`, which not every version's
assembler makes one of.  AMD's compiler, and the interpreter, get the same operation in Triton's own words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import is_cuda

IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.constexpr_function
def in_pairs_code(shift, mask, bits):
    return f"{{.reg .b32 t; shr.b32 t, $1, {shift}; lop3.b32 $0, t, {mask * 0x10001}, {bits * 0x10001}, 0xEA;}}"


@triton.jit
def in_pairs(words, SHIFT: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr):
    """((word >> SHIFT) & MASK) | BITS for each of the words (int16); MASK below 2^(16 - SHIFT), so that no word sees its neighbour's."""
    tl.static_assert(MASK < 1 << (16 - SHIFT))
    if not IS_INTERPRETED and is_cuda():
        return tl.inline_asm_elementwise(in_pairs_code(SHIFT, MASK, BITS), "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    return ((words >> SHIFT) & MASK) | BITS


@triton.constexpr_function
def e4m3_code(shift):
    if shift:
        return "{.reg .b32 s, t; shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 7; lop3.b32 $0, t, 0x3F803F80, s, 0xEA;}"
    return "{.reg .b32 s, t; and.b32 s, $1, 0x80008000; shr.b32 t, $1, 1; lop3.b32 $0, t, 0x3F803F80, s, 0xEA;}"


@triton.jit
def e4m3_in_pairs(words, SHIFT: tl.constexpr):
    """The upper byte of each word once it is moved up by SHIFT (0 or 8): its sign stays where it is, the rest is moved down by one."""
    if not IS_INTERPRETED and is_cuda():
        return tl.inline_asm_elementwise(e4m3_code(SHIFT), "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    moved = words << SHIFT
    return (moved & -0x8000) | ((moved >> 1) & 0x3F80)
