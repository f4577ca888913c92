"""Paged attention, short and long queries, against the oracle in the interpreter: every shape, option and level of the merge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagestream.kernels.attention_plan import make_plan, make_workspace
from pagestream.kernels.kv_format import allocate_pages
from pagestream.kernels.paged_attention import paged_attention
from tests.kernels.attention_cases import SMALL, launch, make_case, oracle, run

HEAD_SIZES = [64, 80, 96, 112, 128, 192, 256]
GROUPS = [(1, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (16, 1), (12, 3)]  # query heads, KV heads
BLOCK_SIZES = [16, 32, 48, 64, 256]
MIXED = [(1, 45), (3, 20), (0, 5), (20, 37), (1, 1)]  # decode, verification, padding, a chunk behind a prefix, a first token


def check(case, *, atol: float, config=SMALL, **options) -> None:
    torch.testing.assert_close(run(case, config, **options).double(), oracle(case), atol=atol, rtol=0)


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_head_sizes(size, dtype, atol):
    check(make_case(MIXED, size=size, dtype=dtype), atol=atol)


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_heads_per_kv_head(heads, kv_heads):
    check(make_case(MIXED, heads=heads, kv_heads=kv_heads), atol=2e-6)


def test_more_heads_per_kv_head_than_a_tile_of_16():
    config = replace(SMALL, rows=32)
    check(make_case([(1, 40), (2, 33), (9, 20)], heads=24, kv_heads=1), atol=2e-6, config=config)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(block_size):
    check(
        make_case([(1, block_size), (2, block_size + 1), (1, block_size - 1), (9, block_size + 5)], block_size=block_size),
        atol=2e-6,
    )


@pytest.mark.parametrize("window", [1, 7, 16, 40])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}], ids=["plain", "softcap", "sinks"]
)
def test_windows(window, options):
    check(make_case([(1, 150), (5, 70), (1, 3), (40, 90)], window=window, **options), atol=2e-6)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])])
def test_softcap_and_sinks(softcap, sinks):
    check(make_case(MIXED, softcap=softcap, sinks=sinks), atol=1e-5)  # a score of cap * tanh carries the rounding of the cap


def test_softcap_of_huge_scores_is_finite():
    case = make_case([(1, 20), (8, 8)], softcap=30.0)
    case.q.mul_(1e6)
    assert run(case).isfinite().all()


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_8_bit_pages(cache_dtype, size):
    check(make_case(MIXED, size=size, cache_dtype=cache_dtype), atol=2e-5)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
def test_8_bit_pages_with_everything_else(cache_dtype):
    options = {"window": 30, "softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}
    check(make_case(MIXED, block_size=32, cache_dtype=cache_dtype, **options), atol=2e-5)
    check(make_case(MIXED, dtype=torch.float16, cache_dtype=cache_dtype), atol=4e-3)


def test_8_bit_codes_cover_their_whole_range():
    """Every code of both formats, NaN codes excepted, comes through as what it stands for."""
    for dtype in (torch.float8_e4m3fn, torch.int8):
        pages = [allocate_pages(2, 1, 16, 64, dtype, "cpu") for _ in range(2)]
        codes = torch.arange(1024) % 256
        if dtype == torch.float8_e4m3fn:
            codes[codes & 0x7F == 0x7F] = 0
        pages[1][1, 0].view(torch.uint8).flatten()[:1024] = codes.to(torch.uint8)
        for page in pages:
            page.view(torch.float32).flatten(2)[1, 0, 256:] = 1.0
        case = replace(
            make_case([(1, 16)], heads=1, kv_heads=1),
            k_cache=pages[0],
            v_cache=pages[1],
            block_tables=torch.ones(1, 1, dtype=torch.int32),
        )
        torch.testing.assert_close(run(case).double(), oracle(case), atol=1e-4, rtol=1e-5)


def test_bfloat16_is_near():
    """The interpreter cuts off instead of rounding, so only nearness can be asked for here."""
    check(make_case(MIXED, dtype=torch.bfloat16), atol=3e-2)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_every_edge(seq_len):
    """Edges of blocks and tiles (16), leaves (32), groups (64)."""
    check(make_case([(1, seq_len), (min(seq_len, 2), seq_len)], heads=2, kv_heads=1), atol=2e-6)


@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 33])
def test_query_lengths(query_len):
    check(make_case([(query_len, query_len), (query_len, query_len + 35)]), atol=2e-6)


def test_padding_sequences_and_rows_are_left_alone():
    case = make_case([(0, 0), (2, 40), (0, 7), (0, 0)], padding_rows=5)
    torch.testing.assert_close(run(case)[:2].double(), oracle(case)[:2], atol=2e-6, rtol=0)


def test_no_query_tokens_at_all():
    assert run(make_case([(0, 3), (0, 0)], padding_rows=1)).shape == (1, 4, 64)


@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=["full", "window"])
def test_a_row_depends_on_its_own_sequence_alone(options):
    """The same bits alone, in a batch, with more or fewer programs, and with no room to split."""
    case = make_case(
        [(1, 150), (3, 70), (20, 40), (0, 1), (6, 36)], heads=2, kv_heads=1, sinks=torch.tensor([0.5, -1.0]), **options
    )
    together = run(case)
    for num_slots, num_sms in ((1, 1), (8, 5)):
        assert torch.equal(run(case, num_slots=num_slots, num_sms=num_sms), together)
    for s, query_len in enumerate(case.query_lens):
        if query_len:
            first = case.query_start[s]
            assert torch.equal(run(case.alone(s)), together[first : first + query_len])


def test_exact_config_gives_the_same_bits_for_every_chunking():
    config = replace(SMALL, short_query=1 << 30)
    whole = make_case([(75, 75)], heads=2, kv_heads=1)
    want = run(whole, config)
    for start, end in ((0, 33), (33, 34), (34, 75)):
        seq_lens, query_start = torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - start], dtype=torch.int32)
        chunk = replace(whole, q=whole.q[start:end], seq_lens=seq_lens, query_start=query_start)
        torch.testing.assert_close(run(chunk, config), want[start:end], atol=0, rtol=0)


def test_replay_with_changed_buffers_equals_a_fresh_run():
    """What a captured graph does: the same tensors and numbers, other contents."""
    case = make_case([(1, 100), (1, 20), (1, 64)], heads=2, kv_heads=1)
    workspace = make_workspace(2, 1, 64, SMALL, "cpu", max_seq_len=100, num_sms=1, num_slots=6)
    run(case, workspace=workspace)
    case.block_tables[:] = case.block_tables[0].clone()
    for lens in ([20, 3, 1], [100, 99, 66]):
        case.seq_lens.copy_(torch.tensor(lens))
        assert torch.equal(run(case, workspace=workspace), run(case))


@pytest.mark.parametrize("seq_len", [33, 64])
def test_one_group_of_leaves_does_not_meet_others(seq_len):
    """Whoever is last of its leaves has the answer: no partial result and no counter of a second level, which take time."""
    case = make_case([(2, seq_len)])
    workspace = make_workspace(4, 2, 64, SMALL, "cpu", max_seq_len=seq_len, num_sms=1, num_slots=8)
    workspace.arrivals[..., 1] = 7
    torch.testing.assert_close(launch(case, SMALL, workspace).double(), oracle(case), atol=1e-5, rtol=0)
    assert (workspace.arrivals[..., 1] == 7).all()


def test_block_ids_of_a_large_pool_do_not_overflow():
    # More than 2**31 elements, of which the system backs only the pages that are touched.
    far = torch.empty(33_000, 64, 16, 64, dtype=torch.float16)
    case = make_case([(1, 3)], heads=64, kv_heads=64, dtype=torch.float16)
    near = case.block_tables[0, 0].item()
    far[32_999] = case.k_cache[near]
    shifted = replace(case, k_cache=far, v_cache=far, block_tables=torch.full((1, 1), 32_999, dtype=torch.int32))
    same = replace(case, v_cache=case.k_cache)
    assert torch.equal(run(shifted, num_slots=4), run(same, num_slots=4))


def test_q_may_be_a_slice_of_wider_rows():
    case = make_case(MIXED)
    wide = torch.randn(case.q.shape[0], 9, 64)
    wide[:, :4] = case.q
    check(replace(case, q=wide[:, :4]), atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: replace(case, q=case.q[:, :3]), "does not fit"),
        (lambda case: replace(case, q=case.q[..., :32].contiguous()), "does not fit"),
        (lambda case: replace(case, q=case.q.transpose(1, 2).contiguous().transpose(1, 2)), "one after another"),
        (lambda case: replace(case, q=case.q.as_strided((1, 4, 64), (1 << 31, 64, 1))), "32 bits"),
        (lambda case: replace(case, v_cache=case.v_cache[1:]), "differ"),
        (lambda case: replace(case, k_cache=case.k_cache.transpose(2, 3).contiguous().transpose(2, 3)), "contiguous"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    case = make_case([(1, 16)])
    workspace = make_workspace(4, 2, 64, SMALL, "cpu", max_seq_len=16, num_sms=1, num_slots=8)
    plan = make_plan(case.seq_lens, case.query_start, SMALL, workspace, heads_per_kv=2, num_tokens=1, max_query_len=1)
    case = change(case)
    with pytest.raises(ValueError, match=message):
        paged_attention(case.q, case.k_cache, case.v_cache, case.block_tables, plan, workspace, SMALL, scale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_combination(size, heads, kv_heads, block_size, cache_dtype):
    dtype = torch.float16 if cache_dtype == torch.float16 else torch.float32
    case = make_case(
        MIXED, size=size, heads=heads, kv_heads=kv_heads, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype, window=33
    )
    check(case, atol=4e-3 if dtype == torch.float16 else 3e-5)
