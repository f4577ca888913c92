"""The cache's memory: given by the system where it is written, or, once asked for, before."""

import ctypes
import mmap
import subprocess
import sys

import pytest
import torch

from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.runner.kv_cache import KVCache, lazy_zeros

SHAPE = ModelShape(vocab_size=10, max_model_len=100, num_layers=2, num_kv_heads=2, head_size=64, eos_token_ids=frozenset())


def is_resident(pages):
    """Of each of the system's pages that lie wholly within, whether it has memory."""
    start = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (pages.data_ptr() + pages.nbytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), found) == 0
    return [bool(page & 1) for page in found]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for memory ahead")
def test_a_populated_cache_has_memory_and_is_still_zero():
    cache = KVCache(SHAPE, block_size=16, num_blocks=9000, num_swap_blocks=0, dtype=torch.bfloat16, device=torch.device("cpu"))
    pages = [pages for layer in cache.layers for pages in (layer.k, layer.v)]
    assert not any(all(is_resident(each)) for each in pages)
    cache.populate()
    assert all(all(is_resident(each)) for each in pages)
    assert not any(each.any() for each in pages)


def test_memory_that_the_system_does_not_have_is_told_with_what_needs_less():
    with pytest.raises(StartError, match=r"^no 65536.00 GiB for the KV cache: Cannot allocate memory; a smaller kv_cache_memory "):
        lazy_zeros((1 << 46,), torch.int8)


PROGRAM = """
import threading, torch
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.runner.kv_cache import KVCache

shape = ModelShape(vocab_size=10, max_model_len=100, num_layers=30, num_kv_heads=3, head_size=64, eos_token_ids=frozenset())
cache = KVCache(shape, block_size=16, num_blocks=20_000, num_swap_blocks=0, dtype=torch.bfloat16, device=torch.device("cpu"))
is_over, has_begun = threading.Event(), threading.Event()

def is_unwanted():
    has_begun.set()
    return is_over.is_set()

threading.Thread(target=cache.populate, args=(is_unwanted,)).start()
has_begun.wait()
is_over.set()
"""


def test_a_process_that_ends_while_its_cache_is_populated_ends_well():
    """Torn out of torch's code by the interpreter's end, the thread would abort the process."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
