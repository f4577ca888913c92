"""The linear with 4-bit and 8-bit weights against the oracle, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from pagestream.kernels import quant_matmul as module
from pagestream.kernels import reference
from pagestream.kernels.quant_matmul import pack, quant_matmul, unpack


def make_weight(num_outputs: int, num_inputs: int, bits: int, group: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(num_outputs, num_inputs // group, generator=generator) / (1 << bits)).to(dtype)
    return codes, scales, -(scales.float() * (1 << bits) / 2).to(dtype)


def check(
    num_rows: int, num_outputs: int, num_inputs: int, *, bits: int, group: int, dtype: torch.dtype, tolerance: float
) -> None:
    codes, scales, minimums = make_weight(
        num_outputs, num_inputs, bits, group, torch.float16 if dtype == torch.float16 else torch.float32
    )
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = pack(codes, scales, minimums, bits=bits, group=group)
    got = quant_matmul(x, weight, upcast=dtype == torch.bfloat16)
    want = reference.quant_matmul(x, codes, scales, minimums)
    torch.testing.assert_close(got.double(), want, atol=tolerance * want.abs().max().item(), rtol=0)
    assert not weight.arrivals.any()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_formats(bits, group, dtype, tolerance):
    check(3, 70, 256, bits=bits, group=group, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32)])
def test_an_odd_multiple_of_half_a_piece(bits, group):
    check(3, 70, 320, bits=bits, group=group, dtype=torch.float32, tolerance=3e-6)


@pytest.mark.parametrize(("bits", "num_inputs"), [(4, 256), (4, 192), (8, 256)])
def test_unpacking_gives_the_weight_back(bits, num_inputs):
    codes, scales, minimums = make_weight(10, num_inputs, bits, 32, torch.float32)
    want = codes * scales.repeat_interleave(32, 1) + minimums.repeat_interleave(32, 1)
    weight = pack(codes, scales, minimums, bits=bits, group=32)
    torch.testing.assert_close(unpack(weight, torch.float32), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(unpack(weight, torch.float32, torch.tensor([7, 0])), want[[7, 0]], atol=1e-6, rtol=0)
    assert unpack(weight, torch.float16).dtype == torch.float16
    torch.testing.assert_close(unpack(weight, torch.float16).float(), want, atol=2e-3, rtol=1e-3)
    assert unpack(weight, torch.float32, torch.zeros(0, dtype=torch.int64)).shape == (0, num_inputs)


def test_unpacking_more_rows_than_are_taken_at_a_time_in_groups_of_more_than_a_run():
    codes, scales, minimums = make_weight(150, 384, 4, 128, torch.float32)
    want = codes * scales.repeat_interleave(128, 1) + minimums.repeat_interleave(128, 1)
    weight = pack(codes, scales, minimums, bits=4, group=128)
    torch.testing.assert_close(unpack(weight, torch.float32), want, atol=1e-6, rtol=0)
    rows = torch.arange(149, -1, -1)
    torch.testing.assert_close(unpack(weight, torch.float32, rows), want[rows], atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
def test_rows(num_rows):
    check(num_rows, 64, 128, bits=4, group=32, dtype=torch.float32, tolerance=3e-6)


def test_splits_of_k_are_added_up(monkeypatch):
    monkeypatch.setattr(module, "MIN_SPLIT", 64)
    check(2, 130, 448, bits=4, group=32, dtype=torch.float32, tolerance=3e-6)
    check(2, 130, 640, bits=8, group=128, dtype=torch.float32, tolerance=3e-6)


def test_a_row_depends_on_itself_alone(monkeypatch):
    monkeypatch.setattr(module, "MIN_SPLIT", 128)
    weight = pack(*make_weight(64, 512, 4, 32, torch.float32), bits=4, group=32)
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(1))
    together = quant_matmul(x, weight)
    for row in (0, 7, 16, 20):
        assert torch.equal(quant_matmul(x[row : row + 1], weight)[0], together[row])


def test_refuses_what_it_has_not():
    codes, scales, minimums = make_weight(8, 128, 4, 32, torch.float32)
    with pytest.raises(ValueError, match="3 bits in groups of 32"):
        pack(codes, scales, minimums, bits=3, group=32)
    with pytest.raises(ValueError, match="over 96 elements"):
        pack(codes[:, :96], scales[:, :3], minimums[:, :3], bits=4, group=32)
    weight = pack(codes, scales, minimums, bits=4, group=32)
    with pytest.raises(ValueError, match="128 inputs"):
        quant_matmul(torch.zeros(1, 64), weight)
    with pytest.raises(ValueError, match="at most 1024 rows"):
        quant_matmul(torch.zeros(1025, 128), weight)
