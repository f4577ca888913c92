"""The Triton backend against the torch backend, in the interpreter: hence here, and not beside the other backends' tests."""

from __future__ import annotations

import pytest
import torch

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.attention.triton_backend import TritonAttention
from pagestream.kernels import reference
from pagestream.kernels.kv_format import allocate_pages
from pagestream.kernels.reshape_and_cache import rotary_table
from tests.kernels.attention_cases import SMALL

HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 2, 1, 64, 16


def make_cache(dtype: torch.dtype = torch.float32) -> LayerCache:
    return LayerCache(*(allocate_pages(24, KV_HEADS, BLOCK_SIZE, SIZE, dtype, "cpu") for _ in range(2)))


def make_step(rows: list[tuple[list[int], int, int]]) -> AttentionMetadata:
    """rows: block table, first position, number of tokens of each sequence."""
    positions = [range(start, start + count) for _, start, count in rows]
    slots = [
        table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for (table, _, _), mine in zip(rows, positions, strict=True)
        for p in mine
    ]
    width = max(len(table) for table, _, _ in rows)
    counts = [count for _, _, count in rows]
    seq_lens = [start + count for _, start, count in rows]
    return AttentionMetadata(
        positions=torch.tensor([p for mine in positions for p in mine]), slot_mapping=torch.tensor(slots),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(), seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table, _, _ in rows], dtype=torch.int32),
        max_query_len=max(counts), max_seq_len=max(seq_lens),
    )  # fmt: skip


STEPS = [  # a prompt beside another; a chunk, a decode step and a longer decode step; verification of drafts
    make_step([([3, 9], 0, 20), ([5, 1, 2, 8], 0, 45)]),
    make_step([([3, 9, 7], 20, 25), ([5, 1, 2, 8], 45, 1), ([11], 0, 1)]),
    make_step([([3, 9, 7], 45, 3), ([5, 1, 2, 8], 46, 1), ([11], 1, 5)]),
]


def qkv(num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    row = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * SIZE, generator=torch.Generator().manual_seed(seed))
    q, k, v = row.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=1)
    return q.unflatten(1, (HEADS, SIZE)), k.unflatten(1, (KV_HEADS, SIZE)), v.unflatten(1, (KV_HEADS, SIZE))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.125),
        AttentionSpec(scale=0.2, window=18, softcap=6.0),
        AttentionSpec(scale=0.1, sinks=torch.tensor([0.5, -1.0])),
    ],
    ids=["plain", "window and softcap", "sinks"],
)
def test_steps_equal_the_torch_backend(spec):
    ours, theirs = TritonAttention(max_seq_len=64, config=SMALL, num_slots=64), TorchAttention()
    cache, want_cache = make_cache(), make_cache()
    for seed, metadata in enumerate(STEPS):
        q, k, v = qkv(len(metadata.positions), seed)
        got = ours.forward(q, k, v, cache, metadata, spec)
        want = theirs.forward(q, k, v, want_cache, metadata, spec)
        torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
        assert torch.equal(cache.k, want_cache.k)
        assert torch.equal(cache.v, want_cache.v)


def test_layers_of_different_windows_share_a_step():
    ours, theirs = TritonAttention(max_seq_len=64, config=SMALL, num_slots=64), TorchAttention()
    caches = [(make_cache(), make_cache()) for _ in range(3)]
    metadata = STEPS[2]
    q, k, v = qkv(9, 0)
    for (cache, want_cache), window in zip(caches, (None, 7, None), strict=True):
        spec = AttentionSpec(scale=0.125, window=window)
        got = ours.forward(q, k, v, cache, metadata, spec)
        torch.testing.assert_close(got, theirs.forward(q, k, v, want_cache, metadata, spec), atol=3e-6, rtol=0)


def test_the_chosen_config_serves_too():
    ours, theirs = TritonAttention(max_seq_len=64, num_slots=64), TorchAttention()
    q, k, v = qkv(65, 0)
    spec = AttentionSpec(scale=0.125)
    got = ours.forward(q, k, v, make_cache(), STEPS[0], spec)
    torch.testing.assert_close(got, theirs.forward(q, k, v, make_cache(), STEPS[0], spec), atol=3e-6, rtol=0)


def test_rotary_and_norms_in_the_same_launch():
    """Equal to doing them first and calling forward."""
    q, k, v = qkv(65, 0)
    spec = AttentionSpec(scale=0.125)
    table = rotary_table(10000.0 ** -(torch.arange(32) / 32), 64)
    norms = {"q_norm": torch.linspace(0.5, 1.5, SIZE), "k_norm": torch.linspace(1.5, 0.5, SIZE)}
    rotated = [
        reference.rotate(reference.rms_norm(x, norms[name], 1e-6)[0], STEPS[0].positions, table).float()
        for name, x in (("q_norm", q), ("k_norm", k))
    ]
    want = TorchAttention().forward(*rotated, v, make_cache(), STEPS[0], spec)
    backend = TritonAttention(max_seq_len=64, config=SMALL, num_slots=64)
    got = backend.rotate_and_forward(q, k, v, make_cache(), STEPS[0], spec, table=table, **norms)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_8_bit_pages_are_written_and_read(dtype):
    """What was written is what the oracle reads from the same pages; int8 is also near the full precision.

    float8 is not asked for that: the interpreter's own rounding to it is not that of a GPU.
    """
    q, k, v = qkv(65, 0)
    spec = AttentionSpec(scale=0.125)
    cache, metadata = make_cache(dtype), STEPS[0]
    got = TritonAttention(max_seq_len=64, config=SMALL, num_slots=64).forward(q, k, v, cache, metadata, spec)
    want = reference.paged_attention(
        q, cache.k, cache.v, metadata.block_tables, metadata.seq_lens, metadata.query_start, scale=0.125
    )
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=0)
    if dtype == torch.int8:
        full = TorchAttention().forward(q, k, v, make_cache(), metadata, spec)
        torch.testing.assert_close(got, full, atol=0.04, rtol=0)
