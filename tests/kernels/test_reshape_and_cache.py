"""K and V into their slots, with rotary and QK-norm, against the oracle, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from pagestream.kernels import reference
from pagestream.kernels.kv_format import allocate_pages
from pagestream.kernels.reshape_and_cache import reshape_and_cache, rotary_table

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


def qkv(num_tokens: int, num_heads: int, num_kv_heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    row = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = row.split([num_heads * size, num_kv_heads * size, num_kv_heads * size], dim=1)
    return tuple(part.view(num_tokens, -1, size) for part in parts)


def both(q, k, v, pages, slots, **options):
    """The oracle's and the kernel's q and pages; the oracle goes first because the kernel writes q in place."""
    want_pages = [page.clone() for page in pages]
    want_q = reference.reshape_and_cache(q, k, v, *want_pages, slots, **options)
    reshape_and_cache(q, k, v, *pages, slots, **options)
    return want_q, want_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary"), [(4, 1, 64, 64), (6, 2, 80, 80), (3, 3, 96, 48), (8, 2, 128, 128), (5, 1, 112, 28)]
)
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_norm_and_write_equal_reference(dtype, heads, kv_heads, size, rotary, norm):
    q, k, v = qkv(5, heads, kv_heads, size, dtype)
    pages = [torch.full((4, kv_heads, 16, size), float("nan"), dtype=dtype) for _ in range(2)]
    slots = torch.tensor([63, 0, 17, -1, 16])
    options = {
        "positions": torch.tensor([0, 5, 1000, 0, 3]),
        "table": rotary_table(10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2)), 1024),
    }
    if norm:
        options |= {"q_norm": 1 + q[0, 0] / 4, "k_norm": 1 + k[0, 0] / 4, "eps": 1e-5}
    want_q, want_pages = both(q, k, v, pages, slots, **options)
    torch.testing.assert_close(q.double(), want_q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for got, want in zip(pages, want_pages, strict=True):
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("size", [64, 80, 112, 192])
def test_plain_write_touches_its_slots_and_nothing_else(size):
    q, k, v = qkv(3, 2, 2, size, torch.float32)
    before = q.clone()
    pages = [torch.full((3, 2, 32, size), float("nan")) for _ in range(2)]
    _, want_pages = both(q, k, v, pages, torch.tensor([40, 95, 0]))
    assert torch.equal(q, before)
    for got, want in zip(pages, want_pages, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("size", [64, 80])
def test_int8_write_equals_reference(size):
    q, k, v = qkv(4, 2, 2, size, torch.float32)
    v[1] = 0.0
    pages = [allocate_pages(3, 2, 16, size, torch.int8, "cpu") for _ in range(2)]
    _, want_pages = both(q, k, v, pages, torch.tensor([47, 3, -1, 16]))
    for got, want in zip(pages, want_pages, strict=True):
        # float32 and float64 may differ by one code where a value lies between two.
        gap = (reference.read_pages(got) - reference.read_pages(want)).abs()
        assert gap.max() < 0.03
        assert (gap > 1e-5).double().mean() < 0.001


@pytest.mark.parametrize("size", [64, 80])
def test_fp8_write_equals_reference(size):
    """On values that are codes times a scale: the interpreter's own rounding to float8 is not that of a GPU."""
    codes = torch.randint(1, 0x7E, (2, 4, 2, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[..., 0] = 0x7E  # 448, so that the scale comes out as 1 / 8
    k, v = (codes.view(torch.float8_e4m3fn).float() / 8).unbind(0)
    pages = [allocate_pages(3, 2, 16, size, torch.float8_e4m3fn, "cpu") for _ in range(2)]
    _, want_pages = both(k.clone(), k, v, pages, torch.tensor([47, 3, -1, 16]))
    for got, want in zip(pages, want_pages, strict=True):
        normal = want.view(torch.uint8) & 0x78 > 0  # the interpreter flushes the subnormal codes
        assert torch.equal(got.view(torch.uint8)[normal], want.view(torch.uint8)[normal])


def test_slots_of_a_large_pool_do_not_overflow():
    # More than 2**31 elements, of which the system backs only the pages that are touched.
    k_cache = torch.empty(40_000, 64, 16, 64, dtype=torch.float16)
    q, k, v = qkv(1, 64, 64, 64, torch.float16)
    reshape_and_cache(q, k, v, k_cache, k_cache, torch.tensor([39_999 * 16 + 3]))
    assert torch.equal(k_cache[39_999, :, 3], v[0])
