"""The compiled attention behind the engine's interface, against the plain torch backend."""

import pytest
import torch

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.attention.cpu_backend import CpuAttentionBackend
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.kernels.cpu.ops import load_ops
from pagestream.kernels.kv_format import page_width


@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backend_agrees_with_plain_torch(dtype, page_dtype):
    ops = load_ops(2)
    assert ops is not None
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, heads, 32).to(dtype) for heads in (4, 2, 2))
    metadata = AttentionMetadata(
        positions=torch.arange(40),
        slot_mapping=torch.arange(40) + 16,
        query_start=torch.tensor([0, 40], dtype=torch.int32),
        seq_lens=torch.tensor([40], dtype=torch.int32),
        block_tables=torch.tensor([[1, 2, 3]], dtype=torch.int32),
        max_query_len=40,
        max_seq_len=40,
    )
    spec = AttentionSpec(scale=0.2, window=9, softcap=30.0, sinks=torch.randn(4))
    results = []
    for backend in (CpuAttentionBackend(ops), TorchAttention()):
        cache = LayerCache(*(torch.empty(5, 2, 16, page_width(32, page_dtype), dtype=page_dtype) for _ in range(2)))
        for pages in (cache.k, cache.v):
            pages.view(torch.uint8).fill_(255)  # NaN, where floats are read
        results.append(backend.forward(q, k, v, cache, metadata, spec))
    assert results[0].dtype == dtype
    torch.testing.assert_close(*(r.float() for r in results), atol=1e-5 if dtype == page_dtype == torch.float32 else 2e-2, rtol=0)
