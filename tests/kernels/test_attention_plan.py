"""The work list against a plain enumeration, in the interpreter."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagestream.kernels.attention_plan import make_plan, make_workspace
from tests.kernels.attention_cases import SMALL


def expected(lens: list[tuple[int, int]], num_slots: int, window: int, short_block: int, long_block: int):
    """Items as (sequence, block, leaf or None), and how many slots the split sequences own."""
    whole, split, long, used = [], [], [], 0
    for s, (query_len, seq_len) in enumerate(lens):
        if query_len > SMALL.short_query:
            long += [(s, block) for block in reversed(range(math.ceil(query_len / long_block)))]
            continue
        blocks = range(math.ceil(query_len / short_block))
        low = max(0, seq_len - query_len - window + 1) // SMALL.leaf if window else 0
        leaves = math.ceil(seq_len / SMALL.leaf) - low
        first, used = used, used + (leaves * query_len if leaves > 1 else 0)
        if leaves > 1 and query_len and used <= num_slots:
            split += [(s, block, leaf, first) for leaf in range(leaves) for block in blocks]
        else:
            whole += [(s, block, -1, -1) for block in blocks]
    return whole + split, long


@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("seed", range(4))
def test_plan_equals_enumeration(window, seed):
    generator = random.Random(seed)
    lens = []
    for _ in range(generator.choice([1, 2, 9, 30])):
        query_len = generator.choice([0, 1, 1, 1, 2, 3, 6, 7, 20, 50])
        lens.append((query_len, query_len + generator.choice([0, 1, 30, 31, 32, 33, 200])))
    num_slots = generator.choice([4, 30, 1000])
    workspace = make_workspace(4, 1, 64, SMALL, "cpu", max_seq_len=256, num_sms=1, num_slots=num_slots)
    query_start = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int()
    plan = make_plan(
        torch.tensor([n for _, n in lens], dtype=torch.int32), query_start, SMALL, workspace, heads_per_kv=4,
        num_tokens=int(query_start[-1]), max_query_len=max(q for q, _ in lens), window=window,
    )  # fmt: skip
    short, long = expected(lens, num_slots, window, SMALL.rows // 4, SMALL.long_rows // 4)
    num_short, num_long = plan.counts.tolist()
    assert [tuple(item) for item in plan.short_items[:num_short].tolist()] == short
    assert [tuple(item[:2]) for item in plan.long_items[:num_long].tolist()] == long
    assert plan.has_long == any(q > SMALL.short_query for q, _ in lens)
