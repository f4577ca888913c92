"""Packed linears against float64, and each row against itself in other company."""

import pytest
import torch

from pagestream.kernels.cpu.ops import load_ops

SIZES = [(1, 1), (33, 17), (576, 576), (192, 1536), (31, 16384), (70, 130)]
DTYPES = [torch.float32, torch.bfloat16]


def case(n, k, dtype, rows=100):
    generator = torch.Generator().manual_seed(n * 7 + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return weight, torch.randn(n, generator=generator), torch.randn(rows, k, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear_equals_float64(ops, n, k, dtype):
    weight, bias, x = case(n, k, dtype)
    expected = x.to(dtype).double() @ weight.double().T + bias.double()  # x is rounded as the contract says
    torch.testing.assert_close(ops.linear(weight, bias)(x).double(), expected, atol=1e-5 + 1e-7 * k, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_row_of_linear_is_the_same_bits_in_any_company(ops, n, k, dtype):
    weight, bias, x = case(n, k, dtype, rows=300)
    linear = ops.linear(weight, bias)
    whole = linear(x)
    for rows in (1, 2, 3, 7, 16, 33, 100):
        for start in (0, 1, 15, 200):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_of_threads_changes_no_bit(dtype):
    weight, bias, x = case(200, 300, dtype)
    results = []
    for threads in (1, 2, 3):
        ops = load_ops(threads)
        assert ops is not None
        results.append(ops.linear(weight, bias)(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_best_is_the_first_of_the_greatest_outputs(ops, n, k, dtype):
    weight, bias, x = case(n, k, dtype)
    weight[n // 2] = weight[n - 1]  # equals, in the same and in other panels
    bias[n // 2] = bias[n - 1] = bias.max() + 1
    linear = ops.linear(weight, bias)
    for rows in (1, 7, 100):
        outputs = linear(x[:rows])
        places, values = linear.best(x[:rows])
        assert torch.equal(values, outputs.max(-1).values)
        assert places.tolist() == outputs.numpy().argmax(-1).tolist()  # the first of equals


def test_best_of_a_row_with_a_nan_is_nan(ops):
    weight, bias, x = case(70, 130, torch.bfloat16, rows=5)
    bias[65] = float("nan")
    assert ops.linear(weight, bias).best(x)[1].isnan().all()
    bias[65] = float("inf")
    assert ops.linear(weight, bias).best(x)[1].isinf().all()
    bias[65] = 0.0
    x[2, 7] = float("nan")
    assert ops.linear(weight, bias).best(x)[1].isnan().tolist() == [False, False, True, False, False]


def test_not_a_number_stays_in_its_row(ops):
    weight, bias, x = case(70, 130, torch.bfloat16, rows=5)
    linear = ops.linear(weight, bias)
    clean = linear(x)
    x[2, 7] = float("nan")
    dirty = linear(x)
    assert dirty[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(dirty[others], clean[others])


def test_strided_weight_and_input_are_taken_as_they_are(ops):
    weight, bias, x = case(40, 24, torch.float32)
    wide = torch.zeros(40, 50)
    wide[:, 3:27] = weight
    expected = ops.linear(weight, bias)(x)
    assert torch.equal(ops.linear(wide[:, 3:27], bias)(x), expected)
    assert torch.equal(ops.linear(weight.T.contiguous().T, bias)(x.T.contiguous().T), expected)


def test_misfits_are_refused(ops):
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.linear(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="bias"):
        ops.linear(torch.zeros(4, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="4 x 6"):
        ops.linear(torch.zeros(4, 6))(torch.zeros(2, 5))
