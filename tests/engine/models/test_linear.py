"""The promise of linear.py: a row's bits do not depend on where it stands, on its neighbours or on the number of threads' shares."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagestream.engine.models.linear import FixedRowsLinear, gelu, gelu_tanh, sigmoid, silu, softplus


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 64), (100, 68), (33, 200)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((150, num_in), (num_out, num_in), (num_out,)))
    linear = FixedRowsLinear(weight, bias)
    whole = linear(x)
    for start, end in [(0, 1), (5, 6), (0, 17), (3, 40), (149, 150), (90, 123)]:
        assert torch.equal(linear(x[start:end]), whole[start:end])


def test_a_linear_equals_torchs_for_any_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(7, 12, generator=generator), torch.randn(7, generator=generator)
    for shape in [(0, 12), (1, 12), (16, 12), (2, 9, 12)]:
        x = torch.randn(shape, generator=generator)
        for b in (bias, None):
            torch.testing.assert_close(FixedRowsLinear(weight, b)(x), F.linear(x, weight, b))


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(silu, F.silu), (gelu, F.gelu), (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")), (sigmoid, torch.sigmoid), (softplus, F.softplus)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_activations_equal_torchs_and_each_element_stands_alone(ours, torchs, dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(30_001, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    x[:4] = torch.tensor([0.0, -200.0, 200.0, 1e-30])
    torch.testing.assert_close(ours(x), torchs(x), atol=tolerance, rtol=tolerance)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        whole = ours(x)
        for start, end in [(0, 1), (1, 18), (7, 1000), (13, 29_999)]:
            assert torch.equal(ours(x[start:end]), whole[start:end])
