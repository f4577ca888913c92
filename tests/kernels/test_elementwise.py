"""RMSNorm, the gated activation and block copies against the oracle, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from pagestream.kernels import reference
from pagestream.kernels.copy_blocks import address_table, copy_blocks
from pagestream.kernels.rms_norm import rms_norm
from pagestream.kernels.swiglu import swiglu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 576), (5, 100)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_reference(dtype, num_tokens, size, with_residual):
    x, weight = random(num_tokens, size, dtype=dtype), 1 + random(size, dtype=dtype, seed=1)
    residual = random(num_tokens, size, dtype=dtype, seed=2) if with_residual else None
    want, want_sum = reference.rms_norm(x, weight, 1e-5, residual=residual)
    got = rms_norm(x, weight, 1e-5, residual=residual)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if residual is not None:
        assert torch.equal(residual.double(), want_sum)


def test_rms_norm_takes_a_slice_of_wider_rows():
    x, weight = random(4, 96)[:, :64], random(64, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), reference.rms_norm(x, weight, 1e-6)[0], atol=2e-6, rtol=2e-6)


def test_rms_norm_refuses_scattered_rows():
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(random(64, 4).t(), random(64), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 1536])
def test_swiglu_equals_reference(dtype, activation, size):
    gate_up = 3 * random(3, 2 * size, dtype=dtype)
    got = swiglu(gate_up, activation=activation)
    want = reference.swiglu(gate_up, activation=activation)
    torch.testing.assert_close(got.double(), want, atol=4 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def test_swiglu_of_huge_gates_is_finite():
    gate_up = torch.tensor([[-1e30, 1e30, -200.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    for activation in ("silu", "gelu_tanh"):
        assert not swiglu(gate_up, activation=activation).isnan().any()


def test_swiglu_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="silu or gelu_tanh, not relu"):
        swiglu(random(1, 8), activation="relu")


@pytest.mark.parametrize("shape", [(9, 2, 16, 8), (7, 3, 16, 100)])  # 1 KB a block, and 19 KB with a last part that is not full
def test_copy_blocks_moves_all_layers_in_one_launch(shape):
    pages = [random(*shape, seed=layer) for layer in range(4)]
    want = [page.clone() for page in pages]
    pairs = torch.tensor([[0, 5], [3, 1], [0, 6]])
    table = address_table(pages, "cpu")
    copy_blocks(table, table, pairs, pages[0][0].numel() * 4)
    reference.copy_blocks(want, want, pairs)
    assert all(torch.equal(got, page) for got, page in zip(pages, want, strict=True))


def test_copy_blocks_swaps_between_pools_of_different_size():
    device, host = [random(6, 2, 16, 8)], [random(3, 2, 16, 8, seed=1)]
    want = [host[0].clone()]
    pairs = torch.tensor([[5, 0], [2, 2]])
    reference.copy_blocks(device, want, pairs)
    copy_blocks(address_table(device, "cpu"), address_table(host, "cpu"), pairs, device[0][0].numel() * 4)
    assert torch.equal(host[0], want[0])


def test_address_table_refuses_tensors_that_differ():
    with pytest.raises(ValueError, match="one shape"):
        address_table([random(2, 1, 16, 8), random(3, 1, 16, 8)], "cpu")
