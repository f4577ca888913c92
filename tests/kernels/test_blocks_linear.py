"""Linears over a GGUF file's own blocks, in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagestream.engine.models.gguf_blocks import GgmlType, RawBlocks, dequantize
from pagestream.engine.models.triton_linear import MOST_ROWS, BlocksLinear, as_tensor, fits, hold_blocks
from pagestream.kernels.cpu.ops import GGUF_KINDS, GgufBlocks

CPU = torch.device("cpu")


def random_blocks(kind: str, num_rows: int, num_columns: int) -> GgufBlocks:
    """Any bytes but those of scales and minimums, which are small numbers."""
    generator = torch.Generator().manual_seed(num_rows)
    width = GGUF_KINDS[kind].block_bytes
    data = torch.randint(0, 256, (num_rows, num_columns // 32, width), dtype=torch.uint8, generator=generator)
    floats = (torch.rand(num_rows, num_columns // 32, 2, generator=generator) - 0.5).half() / 8
    num_floats = 2 if kind == "Q4_1" else 1
    data[..., : 2 * num_floats] = floats[..., :num_floats].contiguous().view(torch.uint8)
    return GgufBlocks(kind, data.flatten(1).contiguous())


def dequantised(blocks: GgufBlocks) -> torch.Tensor:
    return dequantize(RawBlocks(blocks.data, GgmlType[blocks.kind]))


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("num_rows", [1, 5, MOST_ROWS + 1])
def test_equals_the_product_with_the_dequantised_weight(kind, num_rows):
    blocks = random_blocks(kind, 40, 192)
    x, bias = torch.randn(num_rows, 192, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 40)
    got = BlocksLinear(blocks, bias, CPU, torch.float32)(x)
    want = x.double() @ dequantised(blocks).double().t() + bias
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_rows_are_those_of_the_dequantised_weight(kind):
    blocks = random_blocks(kind, 40, 192)
    linear = BlocksLinear(blocks, None, CPU, torch.float32)
    rows = torch.tensor([39, 0, 7, 7])
    torch.testing.assert_close(linear.rows(rows), dequantised(blocks)[rows], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(as_tensor(blocks, CPU, torch.float32), dequantised(blocks), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [3, MOST_ROWS])
def test_rows_may_come_in_several_axes(num_rows):
    """As modules of transformers pass them; 2 x MOST_ROWS are too many for the kernel."""
    linear = hold_blocks(random_blocks("Q4_1", 40, 192), torch.ones(40), device=CPU, dtype=torch.float32)
    x = torch.randn(2, num_rows, 192, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x), linear(x.flatten(0, 1)).view(2, num_rows, 40))


def test_columns_that_the_kernel_has_not_are_held_unpacked():
    blocks = random_blocks("Q8_0", 40, 96)
    linear = hold_blocks(blocks, None, device=CPU, dtype=torch.float32)
    assert not isinstance(linear, BlocksLinear)
    torch.testing.assert_close(linear(torch.eye(96)), dequantised(blocks).t(), atol=1e-6, rtol=1e-6)


def test_a_weight_costs_its_bits():
    blocks = random_blocks("Q4_1", 64, 640)
    assert BlocksLinear(blocks, None, CPU, torch.float32).num_bytes == blocks.data.nbytes
    assert fits(blocks)
    assert not fits(dataclasses.replace(blocks, data=blocks.data[:, :-20]))
