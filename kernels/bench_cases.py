"""The launches that kernels.bench measures and the tests compile: each kernel at the shapes of models that are served.

Default shapes are those of a model of 8 billion weights: 32 query heads and 8 KV heads of 128, hidden size 4096, 14336 in the
MLP, a vocabulary of 128 256.  A case owns its tensors and can be run any number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from pagestream.kernels.attention_plan import AttentionConfig, choose_config, make_plan, make_workspace
from pagestream.kernels.copy_blocks import address_table, copy_blocks
from pagestream.kernels.kv_format import allocate_pages, head_size_of, is_quantised, page_width, scales_view
from pagestream.kernels.paged_attention import paged_attention
from pagestream.kernels.quant_matmul import QuantisedWeight, pack, quant_matmul, unpack
from pagestream.kernels.reshape_and_cache import reshape_and_cache, rotary_table
from pagestream.kernels.rms_norm import rms_norm
from pagestream.kernels.sampling import SamplingTable, sample
from pagestream.kernels.swiglu import swiglu

HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128_256
POOL_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to run, with its floor: the bytes that must move and the multiply-adds (as two FLOPs) that must be done."""

    name: str
    run: Callable[[], object]
    num_bytes: float
    num_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None

    @property
    def name(self) -> str:
        cache = str(self.cache_dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} heads of {self.size}, pages {self.block_size} {cache}"


def attention_case(
    shape: AttentionShape, query_lens: list[int], seq_lens: list[int], *, device: str, arch: int | str, num_sms: int,
    config: AttentionConfig | None = None, num_blocks: int | None = None, max_seq_len: int | None = None,
) -> Case:  # fmt: skip
    """One layer's attention of one step; sequences own the blocks of a pool in turn, and share some if it is small.

    max_seq_len: that of the workspace; None: the longest of seq_lens.
    """
    config = config or choose_config(
        shape.size, shape.heads // shape.kv_heads, arch=arch, quantised=is_quantised(shape.cache_dtype)
    )
    widths = [triton.cdiv(length, shape.block_size) for length in seq_lens]
    num_blocks = num_blocks or sum(widths)
    pages = [pages_of_a_pool(shape, num_blocks, device) for _ in range(2)]
    for page in pages:
        fill(page)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(seq_lens), max(widths), dtype=torch.int32)
    first = 0
    for s, width in enumerate(widths):
        tables[s, :width] = order[torch.arange(first, first + width) % num_blocks].int()
        first += width
    q = torch.randn(sum(query_lens), shape.heads, shape.size, dtype=shape.dtype, device=device)
    workspace = make_workspace(
        shape.heads, shape.kv_heads, shape.size, config, device, max_seq_len=max_seq_len or max(seq_lens), num_sms=num_sms,
        num_slots=None if device != "cpu" else 64,
    )  # fmt: skip
    plan = make_plan(
        torch.tensor(seq_lens, dtype=torch.int32, device=device), torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        config, workspace, heads_per_kv=shape.heads // shape.kv_heads, num_tokens=sum(query_lens),
        max_query_len=max(query_lens), window=shape.window,
    )  # fmt: skip
    tables = tables.to(device)

    def run() -> torch.Tensor:
        return paged_attention(q, pages[0], pages[1], tables, plan, workspace, config, scale=shape.size**-0.5, softcap=shape.softcap)

    element = pages[0].element_size() * page_width(shape.size, shape.cache_dtype)
    visible = sum(query * (length - (query - 1) / 2) for query, length in zip(query_lens, seq_lens, strict=True))
    return Case(
        shape.name, run, num_bytes=2 * sum(seq_lens) * shape.kv_heads * element + 4 * q.numel(),
        num_flops=4 * shape.heads * shape.size * visible,
    )  # fmt: skip


def pages_of_a_pool(shape: AttentionShape, num_blocks: int, device: str) -> torch.Tensor:
    """Pages of some blocks; without a GPU, in storage as large as a GPU's pool, which is part of what is compiled for some."""
    if device != "cpu":
        return allocate_pages(num_blocks, shape.kv_heads, shape.block_size, shape.size, shape.cache_dtype, device)
    sizes = shape.kv_heads, shape.block_size, page_width(shape.size, shape.cache_dtype)
    pool = torch.empty(POOL_BYTES // shape.cache_dtype.itemsize, dtype=shape.cache_dtype)  # the system backs what is written
    return pool[: num_blocks * math.prod(sizes)].view(num_blocks, *sizes)


def fill(page: torch.Tensor) -> None:
    """Random numbers: what is all zeros is multiplied faster."""
    if is_quantised(page.dtype):
        page.view(torch.uint8).random_()
        scales_view(page)[..., page.shape[2] * head_size_of(page) // 4 :] = 0.01
    else:
        page.normal_()


def elementwise_cases(num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """What runs once or twice in every layer beside attention and the linears."""
    x = torch.randn(num_tokens, HIDDEN, dtype=dtype, device=device)
    residual, weight = torch.randn_like(x), torch.ones(HIDDEN, dtype=dtype, device=device)
    gate_up = torch.randn(num_tokens, 2 * INTERMEDIATE, dtype=dtype, device=device)
    heads, kv_heads, size = 32, 8, 128
    row = torch.randn(num_tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    q, k, v = (part.unflatten(1, (-1, size)) for part in row.split([heads * size, kv_heads * size, kv_heads * size], dim=1))
    pages = [allocate_pages(triton.cdiv(num_tokens, 16), kv_heads, 16, size, dtype, device) for _ in range(2)]
    slots = torch.randperm(num_tokens, device=device)
    table = rotary_table(10000.0 ** -(torch.arange(size // 2, device=device) / (size // 2)), 128)
    positions = slots % 128
    return [
        Case(f"add and RMSNorm, {num_tokens} tokens", lambda: rms_norm(x, weight, 1e-5, residual=residual), 4 * x.numel() * 2),
        Case(f"SwiGLU, {num_tokens} tokens", lambda: swiglu(gate_up), 3 * num_tokens * INTERMEDIATE * 2),
        Case(
            f"rotary and KV write, {num_tokens} tokens",
            lambda: reshape_and_cache(q, k, v, pages[0], pages[1], slots, positions=positions, table=table),
            (2 * heads + 4 * kv_heads) * size * 2 * num_tokens,
        ),
    ]


def copy_case(num_pairs: int, device: str, num_layers: int = 32) -> Case:
    """Copy-on-write of some blocks in all layers."""
    pages = [allocate_pages(2 * num_pairs, 8, 16, 128, torch.bfloat16, device) for _ in range(2 * num_layers)]
    table = address_table(pages, device)
    pairs = torch.stack((torch.arange(num_pairs), torch.arange(num_pairs) + num_pairs), dim=1).to(device)
    block_bytes = pages[0][0].numel() * 2

    def run() -> list[torch.Tensor]:
        copy_blocks(table, table, pairs, block_bytes)
        return pages  # the table holds addresses only: this keeps the tensors alive

    return Case(f"copy of {num_pairs} blocks, {num_layers} layers", run, 2 * num_pairs * block_bytes * len(pages))


def sampling_case(
    num_rows: int, device: str, *, top_k: int = 0, top_p: float = 1.0, vocab_size: int = VOCAB, num_said: int = 0
) -> Case:
    """num_said: tokens of each row that its penalties concern."""
    logits = torch.randn(num_rows, vocab_size, device=device)
    floats, ints = torch.zeros(num_rows, 8, device=device), torch.zeros(num_rows, 8, dtype=torch.int64, device=device)
    floats[:, 0], floats[:, 1], floats[:, 3] = 1.0, top_p, 1.0
    ints[:, 0], ints[:, 1] = top_k, torch.arange(num_rows)
    words = torch.zeros(4 + 2 * num_said * num_rows, dtype=torch.int32, device=device)
    entries = words[4:].view(num_rows, num_said, 2)
    entries[..., 0] = torch.arange(num_said, device=device) * (vocab_size // max(num_said, 1))
    entries[..., 1] = torch.ones(1).view(torch.int32).item()
    first = 4 + 2 * num_said * torch.arange(num_rows)
    ints[:, 4] = ints[:, 5] = first  # no biases, then the counts, then nothing ruled out
    ints[:, 6] = ints[:, 7] = first + 2 * num_said
    table = SamplingTable(floats, ints, words)
    name = f"sampling, {num_rows} rows" + (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p}" if top_p < 1 else "")
    name += f", {num_said} tokens penalised" if num_said else ""
    return Case(name, lambda: sample(logits, table), 4.0 * logits.numel())


def unpack_case(
    device: str, *, bits: int, num_outputs: int = INTERMEDIATE, num_inputs: int = HIDDEN, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Before the product of more rows than the quantised linear serves."""
    weight = quantised_weight(num_outputs, num_inputs, bits, 32, dtype, device)
    return Case(
        f"int{bits} weight unpacked, {num_inputs} -> {num_outputs}", lambda: unpack(weight, dtype),
        4 * weight.pieces.numel() + 2 * weight.factors.numel() + dtype.itemsize * num_outputs * num_inputs,
    )  # fmt: skip


def quantised_weight(num_outputs: int, num_inputs: int, bits: int, group: int, dtype: torch.dtype, device: str) -> QuantisedWeight:
    codes = torch.randint(0, 1 << bits, (num_outputs, num_inputs), dtype=torch.uint8, device=device)
    scales = torch.full((num_outputs, num_inputs // group), 0.01, dtype=dtype, device=device)
    return pack(codes, scales, -scales, bits=bits, group=group)


def quant_matmul_case(
    num_rows: int,
    device: str,
    *,
    bits: int,
    group: int,
    num_outputs: int = HIDDEN,
    num_inputs: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    weight = quantised_weight(num_outputs, num_inputs, bits, group, dtype, device)
    x = torch.randn(num_rows, num_inputs, dtype=dtype, device=device)
    return Case(
        f"int{bits} linear, group {group}, {num_rows} x {num_inputs} -> {num_outputs}", lambda: quant_matmul(x, weight),
        4 * weight.pieces.numel() + 2 * weight.factors.numel() + 2 * num_rows * (num_inputs + num_outputs),
        2.0 * num_rows * num_outputs * num_inputs,
    )  # fmt: skip
