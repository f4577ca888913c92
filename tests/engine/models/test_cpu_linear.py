"""The packed linear behind the models' interface."""

import pytest
import torch

from pagestream.engine.models.cpu_linear import CpuLinearMaker
from pagestream.kernels.cpu.ops import load_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_keeps_shape_and_dtype(dtype):
    ops = load_ops(2)
    assert ops is not None
    torch.manual_seed(0)
    weight, bias, x = torch.randn(30, 20).to(dtype), torch.randn(30).to(dtype), torch.randn(2, 3, 20).to(dtype)
    out = CpuLinearMaker(ops)(weight, bias)(x)
    assert out.dtype == dtype
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.double(), expected, atol=torch.finfo(dtype).eps * 10, rtol=torch.finfo(dtype).eps)
