"""Codes out of 16-bit words: all of them, in Triton's own words, and by the instructions that a GPU of NVIDIA gets instead."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagestream.kernels.word_pairs import e4m3_code, e4m3_in_pairs, in_pairs, in_pairs_code

WORDS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


@triton.jit
def _codes_kernel(words_ptr, out_ptr, SHIFT: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, IS_E4M3: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    words = tl.load(words_ptr + at)
    tl.store(out_ptr + at, e4m3_in_pairs(words, SHIFT) if IS_E4M3 else in_pairs(words, SHIFT, MASK, BITS))


def codes(*, shift: int, mask: int = 0, bits: int = 0, is_e4m3: bool = False) -> torch.Tensor:
    out = torch.empty_like(WORDS)
    _codes_kernel[(len(WORDS) // 4096,)](WORDS, out, SHIFT=shift, MASK=mask, BITS=bits, IS_E4M3=is_e4m3)
    return out


def executed(code: str) -> torch.Tensor:
    """What the instructions make of every word, beside two different neighbours."""
    lanes = WORDS.numpy().view(np.uint16).astype(np.uint32)
    results = []
    for neighbours in (np.zeros_like(lanes), np.full_like(lanes, 0xFFFF)):
        for pairs, place in ((lanes | neighbours << 16, 0), (neighbours | lanes << 16, 16)):
            registers = {"$1": pairs}
            for line in re.sub(r"\.reg .b32 [^;]*;", "", code.strip("{}")).split(";")[:-1]:
                name, rest = line.split(maxsplit=1)
                target, *sources = [part.strip() for part in rest.split(",")]
                operands = [registers[one] if one in registers else np.uint32(int(one, 0)) for one in sources]
                registers[target] = OPERATIONS[name](*operands)
            results.append((registers["$0"] >> place).astype(np.uint16))
    assert all(np.array_equal(results[0], other) for other in results)
    return torch.from_numpy(results[0].view(np.int16))


def and_or(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.uint32) -> np.ndarray:
    assert table == (0xF0 & 0xCC) | 0xAA  # the truth table of an operation of three is what it makes of these
    return (a & b) | c


OPERATIONS = {"shl.b32": np.left_shift, "shr.b32": np.right_shift, "and.b32": np.bitwise_and, "lop3.b32": and_or}


@pytest.mark.parametrize(("shift", "mask", "bits"), [(0, 0xFF, 0x6400), (8, 0xFF, 0x6400), (4, 0xF, 0x4300), (12, 0xF, 0), (8, 0x80, 0x4300)])
def test_codes_are_the_same_by_instructions(shift, mask, bits):
    got = codes(shift=shift, mask=mask, bits=bits)
    assert torch.equal(got.int() & 0xFFFF, ((WORDS.int() & 0xFFFF) >> shift & mask) | bits)
    assert torch.equal(executed(in_pairs_code(shift, mask, bits)), got)


@pytest.mark.parametrize("shift", [0, 8])
def test_eight_bit_floats_are_the_same_by_instructions(shift):
    got = codes(shift=shift, is_e4m3=True)
    is_low = shift == 8
    want = WORDS.view(torch.float8_e4m3fn).view(-1, 2)[:, 0 if is_low else 1].float()
    is_number = ~want.isnan()
    assert torch.equal(got.view(torch.float16).float()[is_number] * 256, want[is_number])
    assert torch.equal(executed(e4m3_code(shift)), got)
