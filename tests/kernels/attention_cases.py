"""Ragged paged batches for the attention tests: shuffled blocks, poisoned slots, padding sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagestream.kernels import reference
from pagestream.kernels.attention_plan import AttentionConfig, AttentionWorkspace, make_plan, make_workspace
from pagestream.kernels.kv_format import allocate_pages, is_quantised
from pagestream.kernels.paged_attention import paged_attention

# Small sizes of every kind, so that a few dozen tokens reach every level of the merge.
SMALL = AttentionConfig(short_query=6, leaf=32, group=2, tile=16, rows=16, long_tile=16, long_rows=32)


@dataclass(frozen=True)
class Case:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    options: dict

    @property
    def per_kv(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def query_lens(self) -> list[int]:
        return self.query_start.diff().tolist()

    def alone(self, s: int) -> Case:
        first, last = self.query_start[s].item(), self.query_start[s + 1].item()
        return replace(
            self, q=self.q[first:last], block_tables=self.block_tables[s : s + 1], seq_lens=self.seq_lens[s : s + 1],
            query_start=torch.tensor([0, last - first], dtype=torch.int32),
        )  # fmt: skip


def make_case(
    lens: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, size: int = 64, block_size: int = 16,
    dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, seed: int = 0, padding_rows: int = 0, **options,
) -> Case:  # fmt: skip
    """lens: (query tokens, tokens in the cache after this step) of each sequence; (0, anything) is padding."""
    generator = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    widths = [math.ceil(seq_len / block_size) if query_len else 0 for query_len, seq_len in lens]
    num_blocks = sum(widths) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(lens), max(*widths, 1), dtype=torch.int32)
    pages = [allocate_pages(num_blocks, kv_heads, block_size, size, cache_dtype, "cpu") for _ in range(2)]
    if not is_quantised(cache_dtype):
        for page in pages:
            page.fill_(float("nan"))
    for s, (query_len, seq_len) in enumerate(lens):
        if not query_len:
            continue
        mine = [order.pop() for _ in range(widths[s])]
        tables[s, : len(mine)] = torch.tensor(mine)
        slots = torch.tensor([mine[i // block_size] * block_size + i % block_size for i in range(seq_len)])
        for page in pages:
            reference.write_pages(page, slots, torch.randn(seq_len, kv_heads, size, generator=generator).double())
    query_start = torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0).int()
    q = torch.randn(int(query_start[-1]) + padding_rows, heads, size, generator=generator).to(dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32)
    return Case(q, *pages, tables, seq_lens, query_start, {"scale": size**-0.5, **options})


def run(case: Case, config: AttentionConfig = SMALL, *, num_sms: int = 1, num_slots: int = 512, workspace=None) -> Tensor:
    """The kernels' answer, after checking that they left every counter at zero."""
    if workspace is None:
        kv_heads = case.k_cache.shape[1]
        workspace = make_workspace(
            case.q.shape[1], kv_heads, case.q.shape[2], config, "cpu",
            max_seq_len=int(case.seq_lens.max()), num_sms=num_sms, num_slots=num_slots,
        )  # fmt: skip
        workspace.partials.fill_(float("nan"))
    out = launch(case, config, workspace)
    assert not workspace.arrivals.any()
    assert not workspace.tickets.any()
    return out


def launch(case: Case, config: AttentionConfig, workspace: AttentionWorkspace) -> Tensor:
    options = dict(case.options)
    window = options.pop("window", None)
    plan = make_plan(
        case.seq_lens, case.query_start, config, workspace, heads_per_kv=case.per_kv,
        num_tokens=case.q.shape[0], max_query_len=max(case.query_lens), window=window,
    )  # fmt: skip
    upcast = case.q.dtype == torch.bfloat16
    return paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, plan, workspace, config, upcast=upcast, **options
    )


def oracle(case: Case) -> Tensor:
    return reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, case.query_start, **case.options
    )
