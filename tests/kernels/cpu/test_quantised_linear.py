"""Weights in GGUF blocks: the products must be those of the dequantised weights in bfloat16."""

import numpy as np
import pytest
import torch

from pagestream.kernels.cpu.ops import DecoderOp, DecoderSizes, GgufBlocks, PagedBatch

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


def blocks_of(kind, n, k):
    """Random blocks, and the float32 weight that the gguf library reads from them."""
    import gguf

    random = np.random.default_rng(n + k)
    parts = [random.normal(0, 0.05, (n, k // 32, 1)).astype(np.float16).view(np.uint8)]
    if kind == "Q4_1":
        parts.append(random.normal(0, 0.3, (n, k // 32, 1)).astype(np.float16).view(np.uint8))
    parts.append(random.integers(0, 256, (n, k // 32, 32 if kind == "Q8_0" else 16), dtype=np.uint8))
    data = np.concatenate(parts, axis=-1).reshape(n, -1)
    weight = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return GgufBlocks(kind, torch.from_numpy(data)), torch.from_numpy(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 96), (192, 576)])
def test_products_are_bit_for_bit_those_of_the_dequantised_weight(ops, kind, n, k):
    blocks, weight = blocks_of(kind, n, k)
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(n, dtype=torch.float32)
    quantised, dense = ops.quantised_linear(blocks, bias), ops.linear(weight.to(torch.bfloat16), bias)
    for rows in (1, 16, 33, 70):
        assert torch.equal(quantised(x[:rows]), dense(x)[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_close_to_the_float32_weight(ops, kind):
    blocks, weight = blocks_of(kind, 96, 576)
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ weight.double().T
    got = ops.quantised_linear(blocks)(x).double()
    assert ((got - expected).norm() / expected.norm()).item() < 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_looked_up_in_a_quantised_head_is_the_dequantised_row(ops, kind):
    """The whole decoder with no layers: the norm of the row that was looked up."""
    blocks, weight = blocks_of(kind, 50, 96)
    sizes = DecoderSizes(96, 32, 1, 1, 16, 50, 16, 0.0, 1.0, 1.0, "silu")
    op = DecoderOp(ops, sizes, [], torch.ones(8), torch.ones(96), ops.quantised_linear(blocks), None)
    tokens = torch.tensor([0, 31, 32, 49])
    batch = PagedBatch(
        torch.arange(4), torch.arange(4), torch.tensor([0, 4]), torch.tensor([4]), torch.tensor([[0]])
    )
    rows = weight.to(torch.bfloat16).double()[tokens]
    expected = rows / rows.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(op(tokens, op.pages([], []), batch).double(), expected, atol=1e-5, rtol=1e-5)


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="no operator for Q5_K"):
        GgufBlocks("Q5_K", torch.zeros(1, 20, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not rows of Q4_1 blocks"):
        GgufBlocks("Q4_1", torch.zeros(2, 30, dtype=torch.uint8))
