"""How often a served workload makes Triton compile: every kernel at most twice, whatever the sizes.

A launch's whole numbers are compiled in where they are 1 or multiples of 16, unless a kernel says otherwise; each such surprise
is a pause of seconds in the middle of somebody's answer.
"""

from __future__ import annotations

from collections import Counter

import torch

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.attention.triton_backend import TritonAttention
from pagestream.kernels.bench_cases import copy_case, elementwise_cases, quant_matmul_case, quantised_weight, sampling_case
from pagestream.kernels.kv_format import allocate_pages
from pagestream.kernels.quant_matmul import unpack
from pagestream.kernels.static_analysis import TARGETS, launches_compiled

STEPS = [  # query lengths and table widths of a step
    ([1], 1), ([1, 1], 2), ([1] * 16, 16), ([1] * 17, 63), ([40], 64), ([1, 1, 100], 8), ([2, 3, 4], 5),
    ([512], 33), ([1] * 64, 16),
]  # fmt: skip


def make_step(query_lens: list[int], width: int) -> AttentionMetadata:
    num_tokens = sum(query_lens)
    return AttentionMetadata(
        positions=torch.zeros(num_tokens, dtype=torch.int64), slot_mapping=torch.arange(num_tokens) % 32,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(), seq_lens=torch.tensor(query_lens, dtype=torch.int32),
        block_tables=torch.zeros(len(query_lens), width, dtype=torch.int32),
        max_query_len=max(query_lens), max_seq_len=max(query_lens),
    )  # fmt: skip


def test_serving_compiles_each_kernel_at_most_twice():
    with launches_compiled(TARGETS["sm_90"]) as launches:
        backend = TritonAttention(max_seq_len=1024, num_slots=64)
        cache = LayerCache(*(allocate_pages(2, 1, 16, 64, torch.bfloat16, "cpu") for _ in range(2)))
        for query_lens, width in STEPS:
            metadata = make_step(query_lens, width)
            row = torch.zeros(sum(query_lens), 4 * 64, dtype=torch.bfloat16)
            q, k, v = (part.unflatten(1, (-1, 64)) for part in row.split([128, 64, 64], dim=1))
            backend.forward(q, k, v, cache, metadata, AttentionSpec(scale=0.125))
        for count in (1, 2, 16, 33):
            for case in elementwise_cases(count, "cpu"):
                case.run()
            copy_case(count, "cpu", num_layers=1).run()
            sampling_case(count, "cpu", vocab_size=5000).run()
            sampling_case(count, "cpu", vocab_size=5000, top_k=5, top_p=0.5).run()
            quant_matmul_case(count, "cpu", bits=4, group=32, num_inputs=512, num_outputs=128).run()
            sampling_case(count, "cpu", vocab_size=5000, num_said=3 * count).run()
            weight = quantised_weight(16 * count, 256 * count, 4, 32, torch.bfloat16, "cpu")
            unpack(weight, torch.bfloat16)
            unpack(weight, torch.bfloat16, torch.zeros(count, dtype=torch.int64))
    assert len(launches) > 50
    compiled = Counter(launch.name for launch in launches if launch.fresh)
    assert set(compiled) == {launch.name for launch in launches}
    assert max(compiled.values()) <= 2, compiled


def test_the_counter_counts():
    """A stride that is a multiple of 16 and one that is not are two kernels where a number is not held back from it."""
    with launches_compiled(TARGETS["sm_90"]) as launches:
        for num_inputs in (512, 576):
            quant_matmul_case(1, "cpu", bits=4, group=32, num_inputs=num_inputs, num_outputs=64).run()
    assert [launch.fresh for launch in launches] == [True, True]
