"""The kernels on a real GPU, in bfloat16 with its real rounding, against the oracle; run by tests/gpu/check.sh."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagestream.kernels import reference
from pagestream.kernels.attention_plan import choose_config, make_plan, make_workspace
from pagestream.kernels.bench_cases import AttentionShape, attention_case
from pagestream.kernels.copy_blocks import address_table, copy_blocks
from pagestream.kernels.kv_format import allocate_pages, is_quantised
from pagestream.kernels.paged_attention import paged_attention
from pagestream.kernels.quant_matmul import pack, quant_matmul
from pagestream.kernels.reshape_and_cache import reshape_and_cache, rotary_table
from pagestream.kernels.rms_norm import rms_norm
from pagestream.kernels.sampling import SamplingTable, sample
from pagestream.kernels.swiglu import swiglu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

MIXED = [(1, 1), (1, 700), (3, 5000), (16, 40), (200, 200), (130, 2500), (0, 9), (1, 9000)]  # query tokens, tokens in the cache
CACHES = [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


class Batch:
    """A ragged batch whose pages were written by the kernel itself, and the oracle's answer from those pages."""

    def __init__(self, lens, *, heads=8, kv_heads=2, size=128, block_size=16, cache_dtype=torch.bfloat16, exact=False, **options):
        dtype = torch.bfloat16 if is_quantised(cache_dtype) else cache_dtype
        self.options = {"scale": size**-0.5, **options}
        widths = [-(-seq_len // block_size) for _, seq_len in lens]
        order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(1))
        self.tables = torch.zeros(len(lens), max(widths), dtype=torch.int32)
        self.pages = [allocate_pages(sum(widths), kv_heads, block_size, size, cache_dtype, "cuda") for _ in range(2)]
        first = 0
        for s, (width, (_, seq_len)) in enumerate(zip(widths, lens, strict=True)):
            self.tables[s, :width] = order[first : first + width].int()
            first += width
            position = torch.arange(seq_len)
            slots = self.tables[s, position // block_size].long() * block_size + position % block_size
            k, v = (
                random(seq_len, kv_heads, size, dtype=dtype, seed=2 * s),
                random(seq_len, kv_heads, size, dtype=dtype, seed=2 * s + 1),
            )
            reshape_and_cache(k.clone(), k, v, *self.pages, slots.cuda())
        self.query_lens = [query_len for query_len, _ in lens]
        self.seq_lens = torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32)
        self.query_start = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        self.q = random(sum(self.query_lens), heads, size, dtype=dtype, seed=99)
        self.config = choose_config(size, heads // kv_heads, arch=arch(), quantised=is_quantised(cache_dtype), exact=exact)
        self.tables = self.tables.cuda()

    def run(self, *, num_slots: int | None = None) -> torch.Tensor:
        (_, heads, size), kv_heads = self.q.shape, self.pages[0].shape[1]
        options = dict(self.options)
        window = options.pop("window", None)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        workspace = make_workspace(
            heads, kv_heads, size, self.config, "cuda", max_seq_len=int(self.seq_lens.max()), num_sms=num_sms, num_slots=num_slots
        )
        plan = make_plan(
            self.seq_lens.cuda(), self.query_start.cuda(), self.config, workspace, heads_per_kv=heads // kv_heads,
            num_tokens=self.q.shape[0], max_query_len=max(self.query_lens), window=window,
        )  # fmt: skip
        out = paged_attention(self.q, *self.pages, self.tables, plan, workspace, self.config, **options)
        assert not workspace.arrivals.any()
        assert not workspace.tickets.any()
        return out

    def oracle(self) -> torch.Tensor:
        options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in self.options.items()}
        pages = [page.cpu() for page in self.pages]
        return reference.paged_attention(self.q.cpu(), *pages, self.tables.cpu(), self.seq_lens, self.query_start, **options)

    def check(self) -> None:
        torch.testing.assert_close(self.run().cpu().double(), self.oracle(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_attention_of_every_head_size(size, cache_dtype):
    if cache_dtype == torch.float8_e4m3fn and arch() < 89:
        pytest.skip("this GPU cannot write float8")
    Batch(MIXED, size=size, cache_dtype=cache_dtype).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (5, 1), (16, 1), (32, 1)])
def test_attention_of_every_group(heads, kv_heads):
    Batch(MIXED, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("options", [{"window": 600}, {"softcap": 20.0}, {"window": 100, "softcap": 5.0}], ids=str)
def test_attention_options(options):
    Batch(MIXED, **options).check()
    Batch(MIXED, sinks=torch.linspace(-1, 2, 8).cuda(), block_size=64, **options).check()


def test_attention_bits_do_not_depend_on_company_or_room():
    """Here programs really race for their items and for who merges."""
    batch = Batch([(1, 9000), (2, 3000), (1, 513), (5, 40), (1, 20000)] * 6)
    want = batch.run()
    for num_slots in (None, None, None, 64, 1, 1000):
        assert torch.equal(batch.run(num_slots=num_slots), want)


def test_exact_config_gives_the_same_bits_for_every_chunking():
    whole = Batch([(1200, 1200)], exact=True)
    want = whole.run()
    for start in (1199, 1190, 700, 1):
        whole.q, whole.query_lens, whole.query_start = (
            whole.q[start - 1200 :],
            [1200 - start],
            torch.tensor([0, 1200 - start]).int(),
        )
        assert torch.equal(whole.run(), want[start:])
        whole = Batch([(1200, 1200)], exact=True)


def test_attention_in_a_graph_follows_its_buffers():
    case = attention_case(AttentionShape(), [1] * 8, [4096] * 8, device="cuda", arch=arch(), num_sms=132)
    eager = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


def test_elementwise():
    x, weight, residual = random(70, 4096), 1 + random(4096, seed=1) / 8, random(70, 4096, seed=2)
    want, want_sum = reference.rms_norm(x.cpu(), weight.cpu(), 1e-5, residual=residual.cpu())
    got = rms_norm(x, weight, 1e-5, residual=residual)
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-2, rtol=1e-2)
    assert torch.equal(residual.cpu().double(), want_sum)
    gate_up = 2 * random(33, 2 * 1536)
    torch.testing.assert_close(swiglu(gate_up).cpu().double(), reference.swiglu(gate_up.cpu()), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(("size", "rotary"), [(128, 128), (80, 80), (96, 48)])
def test_rotary_and_norms(size, rotary):
    row = random(40, 8 * size)
    q, k, v = (part.unflatten(1, (-1, size)) for part in row.split([4 * size, 2 * size, 2 * size], dim=1))
    pages = [torch.zeros(4, 2, 16, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    want_pages = [page.cpu() for page in pages]
    slots, positions = torch.randperm(64)[:40], torch.arange(40) * 25
    table = rotary_table(10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2)), 1024)
    norm = 1 + random(size, seed=3) / 8
    want = reference.reshape_and_cache(
        q.cpu(), k.cpu(), v.cpu(), *want_pages, slots, positions=positions, table=table, q_norm=norm.cpu(), k_norm=norm.cpu()
    )
    reshape_and_cache(q, k, v, *pages, slots.cuda(), positions=positions.cuda(), table=table.cuda(), q_norm=norm, k_norm=norm)
    torch.testing.assert_close(q.cpu().double(), want, atol=3e-2, rtol=1e-2)
    for got, want_page in zip(pages, want_pages, strict=True):
        torch.testing.assert_close(got.cpu(), want_page, atol=3e-2, rtol=1e-2)


def test_blocks_move_to_pinned_memory_and_back():
    device, host = (
        [random(9, 2, 16, 64) for _ in range(3)],
        [torch.zeros(5, 2, 16, 64, dtype=torch.bfloat16).pin_memory() for _ in range(3)],
    )
    device_table, host_table = address_table(device, "cuda"), address_table(host, "cuda")
    want = [page[[7, 2]].cpu() for page in device]
    block_bytes = device[0][0].numel() * 2
    copy_blocks(device_table, host_table, torch.tensor([[7, 0], [2, 4]]).cuda(), block_bytes)
    copy_blocks(host_table, device_table, torch.tensor([[0, 1], [4, 3]]).cuda(), block_bytes)
    torch.cuda.synchronize()
    assert all(torch.equal(page[[0, 4]], block) for page, block in zip(host, want, strict=True))
    assert all(torch.equal(page[[1, 3]].cpu(), block) for page, block in zip(device, want, strict=True))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantised_linear(bits, group, dtype):
    codes = torch.randint(0, 1 << bits, (700, 4096), dtype=torch.uint8)
    scales = (torch.rand(700, 4096 // group) / (1 << bits)).to(dtype)
    minimums = (-scales * (1 << bits) / 2).to(dtype)
    weight = pack(codes.cuda(), scales.cuda(), minimums.cuda(), bits=bits, group=group)
    x = random(19, 4096, dtype=dtype)
    got, want = quant_matmul(x, weight), reference.quant_matmul(x.cpu(), codes, scales, minimums)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-2 * want.abs().max().item(), rtol=0)
    assert torch.equal(quant_matmul(x[7:8], weight)[0], got[7])


def test_sampling():
    """Every second row with entries of all three kinds in all blocks, and a mask of every other token."""
    vocab_size, rows = (
        5000,
        [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.2, 0, 0.8, 0.0), (1.0, 100, 0.9, 0.02)] * 4,
    )
    logits = 3 * random(len(rows), vocab_size, dtype=torch.float32)
    floats, ints = torch.zeros(len(rows), 8), torch.zeros(len(rows), 8, dtype=torch.int64)
    tokens = [torch.arange(start, vocab_size, step) for start, step in ((0, 7), (1, 5), (2, 11))]
    values = [torch.linspace(-2, 2, len(tokens[0])), (torch.arange(len(tokens[1])) % 3).float(), torch.zeros(len(tokens[2]))]
    entries = [torch.stack((at.int(), value.view(torch.int32)), dim=1).flatten() for at, value in zip(tokens, values, strict=True)]
    mask = torch.full((-(-vocab_size // 32),), 0x55555555, dtype=torch.int32)  # even tokens
    words = torch.cat([torch.zeros(4, dtype=torch.int32), mask, *entries])
    begins = torch.tensor([4 + len(mask), *map(len, entries)]).cumsum(0)
    for r, (temperature, top_k, top_p, min_p) in enumerate(rows):
        floats[r, :6] = torch.tensor([temperature, top_p, min_p, 1.3, 0.2, 0.4])
        ints[r, :3] = torch.tensor([top_k, r - 3, 10 * r])
        if r % 2:
            ints[r, 3], ints[r, 4:] = 4, begins
    got = sample(logits, SamplingTable(floats.cuda(), ints.cuda(), words.cuda()))
    torch.testing.assert_close(got.log_sum_exp.double(), logits.double().logsumexp(-1), atol=1e-4, rtol=0)
    counts, in_prompt = torch.zeros(vocab_size), torch.zeros(vocab_size, dtype=torch.bool)
    counts[tokens[1]], in_prompt[tokens[1]] = values[1], True
    for r, (temperature, top_k, top_p, min_p) in enumerate(rows):
        x = logits[r].cpu().double()
        if r % 2:
            x = reference.processed_logits(
                x, biases=dict(zip(tokens[0].tolist(), values[0].tolist(), strict=True)), counts=counts, in_prompt=in_prompt,
                allowed=torch.arange(vocab_size) % 2 == 0, repetition=1.3, frequency=0.2, presence=0.4,
            )  # fmt: skip
            x[tokens[2]] = -torch.inf
        scores = reference.sampling_scores(
            x, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=r - 3, position=10 * r
        )
        assert scores[got.tokens[r].item()] >= scores.max() - 1e-3


def test_a_config_may_be_replaced():
    """The plan and the kernel must be given the same one; a second config needs no other buffers than its own."""
    batch = Batch(MIXED)
    batch.config = dataclasses.replace(batch.config, leaf=1024, group=4)
    batch.check()
