"""Paged attention against float64, and each query against itself in other chunks and other company."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pagestream.kernels import reference
from pagestream.kernels.cpu.ops import CpuOps, PagedBatch, load_ops
from pagestream.kernels.kv_format import is_quantised, page_width

LENS = [300, 1, 17, 64, 70, 600]
# heads, KV heads, head size, block size: around granules of 16 and tiles of 32, and such that fit neither
SHAPES = [(9, 3, 64, 16), (4, 4, 80, 32), (8, 1, 128, 48), (6, 2, 16, 16), (2, 1, 256, 16), (4, 2, 10, 16)]
# With 8 bits, a weight and its value's scale are rounded to bfloat16 as one.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.int8: 1.6e-2, torch.float8_e4m3fn: 1.6e-2}
OPTIONS = [{}, {"window": 40, "sinks": True}, {"window": 100, "softcap": 20.0}]
# Floats of 8 bits differ from integers in their codes alone.
DTYPES_AND_OPTIONS = [(dtype, options) for dtype in TOLERANCES for options in (OPTIONS[2:] if dtype == torch.float8_e4m3fn else OPTIONS)]


@dataclass
class Sequence:
    q: Tensor
    k: Tensor
    v: Tensor
    table: list[int]
    num_done: int = 0

    def __len__(self) -> int:
        return len(self.q)


def dequantised(pages: Tensor, *, are_keys: bool) -> Tensor:
    """What pages of codes hold, read as kernels/cpu/codes.h and paged.h describe them: [B, G, K, D] float64."""
    size, dtype = pages.shape[3] - 4, pages.dtype
    granules = pages.view(torch.uint8).flatten(2).unflatten(2, (-1, 16 * (size + 4)))
    scales = granules[..., 16 * size :].contiguous().view(torch.float32)
    words = granules[..., : 16 * size].unflatten(-1, (size // 4, 16, 4) if are_keys else (4, size, 4))[..., [0, 2, 1, 3]]
    codes = words.transpose(3, 4).flatten(4) if are_keys else words.transpose(4, 5).flatten(3, 4)
    if dtype == torch.int8:
        values = torch.where(codes > 127, -1, 1) * (codes & 127).double()
    else:
        values = codes.contiguous().view(dtype).double()
    return (values * scales.double()[..., None]).flatten(2, 3)


class Case:
    """Some sequences over shuffled blocks, in pages full of NaN."""

    def __init__(self, shape, dtype, options, lens=LENS):
        self.heads, self.kv_heads, self.size, self.block_size = shape
        generator = torch.Generator().manual_seed(sum(shape))
        self.dtype = dtype
        if is_quantised(dtype):  # of which a word takes four codes
            self.size += self.size % 4

        def rand(*sizes: int) -> Tensor:  # representable in the pages' type, in that of the products where it has scales
            exact = torch.bfloat16 if is_quantised(dtype) else dtype
            return torch.randn(*sizes, generator=generator).to(exact).float()

        self.options = dict(options)
        if self.options.pop("sinks", False):
            self.options["sinks"] = rand(self.heads)
        counts = [math.ceil(n / self.block_size) for n in lens]
        order = iter(torch.randperm(sum(counts) + 3, generator=generator).tolist())
        self.sequences = [
            Sequence(
                2 * rand(n, self.heads, self.size),
                rand(n, self.kv_heads, self.size),
                rand(n, self.kv_heads, self.size),
                [next(order) for _ in range(count)],
            )
            for n, count in zip(lens, counts, strict=True)
        ]
        pages = torch.empty(sum(counts) + 3, self.kv_heads, self.block_size, page_width(self.size, dtype), dtype=dtype)
        pages.view(torch.uint8).fill_(255)  # NaN, as a value and as a scale
        self.k_pages, self.v_pages = pages, pages.clone()

    def step(self, ops: CpuOps, taken: dict[int, int]) -> list[Tensor]:
        """Compute the next `taken[s]` tokens of each sequence s."""
        batches, widest = [], max(len(self.sequences[s].table) for s in taken) + 1
        tables = torch.zeros(len(taken), widest, dtype=torch.int32)
        for row, (s, count) in enumerate(taken.items()):
            sequence = self.sequences[s]
            positions = torch.arange(sequence.num_done, sequence.num_done + count)
            table = torch.tensor(sequence.table)
            tables[row, : len(table)] = table
            slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
            sequence.num_done += count
            batches.append((positions, slots, sequence.q[positions], sequence.k[positions], sequence.v[positions]))
        positions, slots, q, k, v = (torch.cat(parts) for parts in zip(*batches, strict=True))
        starts = torch.tensor([0, *taken.values()]).cumsum(0).int()
        lens = torch.tensor([self.sequences[s].num_done for s in taken]).int()
        batch = PagedBatch(positions, slots, starts, lens, tables)
        out = ops.paged_attention(q, k, v, self.k_pages, self.v_pages, batch, scale=self.size**-0.5, **self.options)
        return list(out.split(list(taken.values())))

    def run(self, ops: CpuOps, chunk: int, singly: int = 0, only: int | None = None) -> list[Tensor]:
        """All of each sequence (or of one), `chunk` tokens at a time, the last `singly` tokens one at a time."""
        chosen = range(len(self.sequences)) if only is None else [only]
        outs: dict[int, list[Tensor]] = {s: [] for s in chosen}
        for s in chosen:
            self.sequences[s].num_done = 0

        def next_count(sequence: Sequence) -> int:
            left = len(sequence) - sequence.num_done
            return min(chunk, left - singly) if left > singly else min(left, 1)

        while taken := {s: count for s in chosen if (count := next_count(self.sequences[s]))}:
            for s, part in zip(taken, self.step(ops, taken), strict=True):
                outs[s].append(part)
        return [torch.cat(parts) for parts in outs.values()]

    def expected(self, sequence: Sequence) -> Tensor:
        group = self.heads // self.kv_heads
        k, v = sequence.k.double(), sequence.v.double()
        if is_quantised(self.dtype):
            k, v = (
                dequantised(pages[sequence.table], are_keys=pages is self.k_pages).transpose(1, 2).flatten(0, 1)[: len(sequence)]
                for pages in (self.k_pages, self.v_pages)
            )
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,lhd->htl", sequence.q.double(), k) * self.size**-0.5
        if softcap := self.options.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(len(sequence))
        seen = position[None] <= position[:, None]
        if window := self.options.get("window"):
            seen &= position[None] > position[:, None] - window
        scores = scores.masked_fill(~seen, -math.inf)
        if (sinks := self.options.get("sinks")) is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(sequence), 1)], -1)
        return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(sequence)], v)


@pytest.mark.parametrize(("dtype", "options"), DTYPES_AND_OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(ops, shape, dtype, options):
    case = Case(shape, dtype, options)
    for sequence, out in zip(case.sequences, case.run(ops, chunk=1000), strict=True):
        torch.testing.assert_close(out.double(), case.expected(sequence), atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize(("dtype", "options"), DTYPES_AND_OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_query_is_the_same_bits_in_any_chunk_and_company(ops, shape, dtype, options):
    case = Case(shape, dtype, options, lens=[1, 17, 64, 290])
    whole = case.run(ops, chunk=1000)
    for chunk, singly in ((64, 20), (16, 0), (11, 0), (1000, 5)):
        for mine, other in zip(whole, case.run(ops, chunk, singly), strict=True):
            assert torch.equal(mine, other), (chunk, singly)
    assert torch.equal(case.run(ops, chunk=50, singly=3, only=3)[0], whole[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_number_of_threads_changes_no_bit(dtype):
    case = Case(SHAPES[0], dtype, {}, lens=[700, 20])
    results = []
    for threads in (1, 2, 3):
        ops = load_ops(threads)
        assert ops is not None
        results += [case.run(ops, chunk=1000), case.run(ops, chunk=699)]
    for other in results[1:]:
        assert all(torch.equal(mine, out) for mine, out in zip(results[0], other, strict=True))


def write(ops: CpuOps, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of one block and KV head that hold x [T, D] as keys and as values, and what its last token makes of the values."""
    count, size = x.shape
    pages = torch.zeros(1, 1, 16, page_width(size, dtype), dtype=dtype)
    batch = PagedBatch(
        torch.arange(count), torch.arange(count), torch.tensor([0, count]), torch.tensor([count]), torch.zeros(1, 1, dtype=torch.int32)
    )
    values = pages.clone()
    out = ops.paged_attention(torch.zeros(count, 1, size), x[:, None], x[:, None], pages, values, batch, scale=1.0)
    return pages, values, out[-1, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_and_scales_are_those_of_the_oracle(ops, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, generator=generator) * 10.0 ** torch.randint(-6, 6, (16, 64), generator=generator)  # also below the least code
    x[3], x[4, 0] = 0, 448.0
    codes, scales = reference.quantise(x, dtype)
    for pages, are_keys in zip(write(ops, dtype, x)[:2], (True, False), strict=True):
        held = dequantised(pages, are_keys=are_keys)[0, 0]
        torch.testing.assert_close(held, codes.double() * scales.double()[:, None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_every_code_is_read_as_what_it_stands_for(ops, dtype):
    codes = torch.arange(256).to(torch.uint8)
    every = torch.arange(-128, 128).clamp(-127).float() if dtype == torch.int8 else codes.view(dtype).float().nan_to_num()
    *_, out = write(ops, dtype, every[None])  # the greatest is what makes the scale 1
    torch.testing.assert_close(out, every, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(ops, dtype, bad):
    x = torch.ones(2, 16)
    x[0, 5] = bad
    assert write(ops, dtype, x)[2].isnan().all()


def test_heads_that_words_of_codes_do_not_fill_are_refused(ops):
    with pytest.raises(ValueError, match="heads of 10"):
        write(ops, torch.int8, torch.ones(1, 10))


def test_negative_slots_are_not_written(ops):
    pages = torch.zeros(2, 1, 16, 16)
    batch = PagedBatch(
        torch.tensor([0, 1]), torch.tensor([16, -1]), torch.tensor([0, 2]), torch.tensor([2]), torch.tensor([[1]])
    )
    x = torch.ones(2, 1, 16)
    values = pages.clone()
    ops.paged_attention(x, x, x, pages, values, batch, scale=1.0)
    assert values.sum() == 16
    assert values[1].sum() == 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot_mapping": torch.tensor([64])},
        {"block_tables": torch.tensor([[4]])},
        {"block_tables": torch.tensor([[-1]])},
        {"seq_lens": torch.tensor([17])},
        {"positions": torch.tensor([1])},
        {"query_start": torch.tensor([0, 2])},
    ],
    ids=lambda wrong: str(next(iter(wrong))),
)
def test_batches_that_name_what_does_not_exist_are_refused(ops, wrong):
    pages = torch.zeros(4, 1, 16, 16)
    right = {
        "positions": torch.tensor([0]),
        "slot_mapping": torch.tensor([0]),
        "query_start": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([1]),
        "block_tables": torch.tensor([[0]]),
    }
    x = torch.ones(1, 1, 16)
    with pytest.raises(ValueError, match="does not exist"):
        ops.paged_attention(x, x, x, pages, pages.clone(), PagedBatch(**right | wrong), scale=1.0)
    assert pages.sum() == 0
