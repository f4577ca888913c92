"""The plain-torch paged attention against a float64 reference, and the bits of a row against its company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.attention.torch_backend import TILE, TorchAttention
from pagestream.kernels import reference as oracle
from pagestream.kernels.kv_format import page_width

BLOCK_SIZE = 16


class Pages:
    """Sequences in a shuffled pool whose unused slots are NaN, fed chunk by chunk."""

    def __init__(self, seq_lens: list[int], *, num_heads: int, num_kv_heads: int, head_size: int, dtype=torch.float32, seed=0, page_dtype=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.q = [self.normal(n, num_heads, head_size).to(dtype) for n in seq_lens]
        self.k = [self.normal(n, num_kv_heads, head_size).to(dtype) for n in seq_lens]
        self.v = [self.normal(n, num_kv_heads, head_size).to(dtype) for n in seq_lens]
        blocks_of = [-(-n // BLOCK_SIZE) for n in seq_lens]
        num_blocks = sum(blocks_of) + 3
        order = torch.randperm(num_blocks, generator=self.generator)[: sum(blocks_of)]
        self.tables = list(torch.split(order, blocks_of))
        page_dtype = page_dtype or dtype
        shape = (num_blocks, num_kv_heads, BLOCK_SIZE, page_width(head_size, page_dtype))
        pages = torch.empty(shape, dtype=page_dtype)
        pages.view(torch.uint8).fill_(255)  # NaN
        self.cache = LayerCache(k=pages, v=pages.clone())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def step(self, ranges: dict[int, tuple[int, int]], spec: AttentionSpec) -> dict[int, Tensor]:
        """Compute positions [start, end) of some sequences in one step."""
        slots, positions, starts, lens = [], [], [0], []
        for s, (start, end) in ranges.items():
            position = torch.arange(start, end)
            positions.append(position)
            slots.append(self.tables[s][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(starts[-1] + end - start)
            lens.append(end)
        tables = torch.zeros(len(ranges), max(len(self.tables[s]) for s in ranges), dtype=torch.int32)
        for row, (s, (_, end)) in enumerate(ranges.items()):
            used = -(-end // BLOCK_SIZE)
            tables[row, :used] = self.tables[s][:used]
        metadata = AttentionMetadata(
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=tables,
            max_query_len=max(end - start for start, end in ranges.values()),
            max_seq_len=max(lens),
        )
        parts = [torch.cat([x[s][start:end] for s, (start, end) in ranges.items()]) for x in (self.q, self.k, self.v)]
        out = TorchAttention().forward(*parts, self.cache, metadata, spec)
        return dict(zip(ranges, torch.split(out, [end - start for start, end in ranges.values()]), strict=True))


def reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention over one whole sequence in float64, one head at a time."""
    n, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(num_heads):
        scores = q[:, head].double() @ k[:, head // group].double().T * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (distance < 0) | (distance >= (spec.window or n + 1))
        scores = scores.masked_fill(hidden, -math.inf)
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks[head].double().expand(n, 1)], dim=1)
        weights = torch.softmax(scores, dim=1)[:, :n]
        out[:, head] = weights @ v[:, head // group].double()
    return out


SPECS = {
    "plain": AttentionSpec(scale=0.25),
    "window": AttentionSpec(scale=0.25, window=37),
    "window of one tile": AttentionSpec(scale=0.25, window=TILE),
    "softcap": AttentionSpec(scale=0.5, softcap=2.0),
    "sinks": AttentionSpec(scale=0.25, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, 1.0])),
    "all": AttentionSpec(scale=0.25, window=20, softcap=5.0, sinks=torch.linspace(-2.0, 2.0, 6)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seq_lens", [[1], [15, 16, 17], [127, 128, 129, 1], [300, 5]])
def test_equals_reference(name: str, seq_lens: list[int]) -> None:
    pages = Pages(seq_lens, num_heads=6, num_kv_heads=2, head_size=24)
    out = pages.step({s: (0, n) for s, n in enumerate(seq_lens)}, SPECS[name])
    for s in range(len(seq_lens)):
        expected = reference(pages.q[s], pages.k[s], pages.v[s], SPECS[name])
        torch.testing.assert_close(out[s].double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_equals_reference_in_half_precision(dtype: torch.dtype, atol: float) -> None:
    pages = Pages([33, 150], num_heads=4, num_kv_heads=4, head_size=32, dtype=dtype)
    spec = AttentionSpec(scale=32**-0.5)
    out = pages.step({0: (0, 33), 1: (0, 150)}, spec)
    for s in range(2):
        assert out[s].dtype == dtype
        torch.testing.assert_close(out[s].double(), reference(pages.q[s], pages.k[s], pages.v[s], spec), atol=atol, rtol=0)


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", SPECS)
def test_pages_of_8_bits_hold_what_the_oracle_reads_from_them(name: str, page_dtype: torch.dtype) -> None:
    seq_lens = [127, 33, 1]
    pages = Pages(seq_lens, num_heads=6, num_kv_heads=2, head_size=24, page_dtype=page_dtype)
    out = pages.step({s: (0, n) for s, n in enumerate(seq_lens)}, SPECS[name])
    for s, count in enumerate(seq_lens):
        k, v = (oracle.read_pages(cache)[pages.tables[s]].transpose(1, 2).flatten(0, 1)[:count] for cache in (pages.cache.k, pages.cache.v))
        for held, given in ((k, pages.k[s]), (v, pages.v[s])):
            codes, scales = oracle.quantise(given, page_dtype)
            torch.testing.assert_close(held, codes.double() * scales.double()[..., None], rtol=1e-6, atol=0)
        torch.testing.assert_close(out[s].double(), reference(pages.q[s], k, v, SPECS[name]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "page_dtype"), [*((name, torch.float32) for name in SPECS), ("all", torch.int8)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bits_do_not_depend_on_chunking_or_company(name: str, page_dtype: torch.dtype, num_threads: int) -> None:
    seq_lens = [201, 64, 7, 130]
    alone, mixed = (Pages(seq_lens, num_heads=6, num_kv_heads=2, head_size=24, page_dtype=page_dtype) for _ in range(2))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = {s: alone.step({s: (0, n)}, SPECS[name])[s] for s, n in enumerate(seq_lens)}
        parts: dict[int, list[Tensor]] = {s: [] for s in range(len(seq_lens))}
        done = dict.fromkeys(parts, 0)
        for size in [1, 2, 31, 16, 64, 1, 1, 85]:  # 201 in all
            ranges = {s: (done[s], min(done[s] + size, n)) for s, n in enumerate(seq_lens) if done[s] < n}
            for s, out in mixed.step(ranges, SPECS[name]).items():
                parts[s].append(out)
                done[s] = ranges[s][1]
    finally:
        torch.set_num_threads(threads_before)
    for s in whole:
        assert torch.equal(whole[s], torch.cat(parts[s]))


def test_each_token_is_written_to_its_slot_and_nothing_else() -> None:
    pages = Pages([20], num_heads=2, num_kv_heads=2, head_size=8)
    pages.step({0: (0, 20)}, AttentionSpec(scale=1.0))
    for position in range(20):
        block, offset = pages.tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE
        assert torch.equal(pages.cache.k[block, :, offset], pages.k[0][position])
        assert torch.equal(pages.cache.v[block, :, offset], pages.v[0][position])
    num_kv_heads, head_size = pages.cache.k.shape[1], pages.cache.k.shape[3]
    assert int((~pages.cache.k.isnan()).sum()) == 20 * num_kv_heads * head_size
