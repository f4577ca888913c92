"""The cache's memory: given by the system where it is written, or, once asked for, before."""

import resource
import sys

import pytest
import torch

from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.runner.kv_cache import KVCache

SHAPE = ModelShape(vocab_size=10, max_model_len=100, num_layers=2, num_kv_heads=2, head_size=64, eos_token_ids=frozenset())


def faults_of(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def make_cache():
    return KVCache(
        SHAPE, block_size=16, num_blocks=4000, num_swap_blocks=0, dtype=torch.bfloat16, device=torch.device("cpu")
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for memory ahead")
def test_a_populated_cache_faults_no_more():
    lazy, populated = make_cache(), make_cache()
    populated.populate()
    assert all(not layer.k.any() and not layer.v.any() for layer in populated.layers)

    def write(cache):
        for layer in cache.layers:
            layer.k.fill_(1.0)
            layer.v.fill_(2.0)

    assert faults_of(lambda: write(populated)) < faults_of(lambda: write(lazy)) / 4
