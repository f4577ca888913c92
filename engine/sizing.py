"""How much of everything: the step's budget, the pools, and the length that fits."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pagestream.engine.core.config import CacheConfig, EngineConfig, PreemptionMode, SchedulerLimits
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.runner.kv_cache import bytes_per_block

logger = logging.getLogger(__name__)

GIB = 1 << 30
MOST_DEFAULT_CPU_CACHE_BYTES = 2 * GIB
PREFILL_TOKENS_PER_DECODE = 6  # a step of 32 who decode takes three times as long with 192 prompt tokens
CONTEXT_TOKENS_PER_PREFILL_TOKEN = 100  # reading the keys and values of so many takes half as long as computing one
NUM_ROWS_AT_ONCE = 32  # of two threads, a tile of 16 each
DEFAULT_GPU_SWAP_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int


DEFAULTS = {"cpu": DeviceDefaults(64, 512, 96), "cuda": DeviceDefaults(256, 8192, 2048)}


def step_limits(config: EngineConfig, device: torch.device) -> SchedulerLimits:
    """The step's budget; raises StartError if it can't hold one token of every sequence."""
    defaults = DEFAULTS[device.type]
    asked = config.scheduler
    num_tokens = asked.max_num_batched_tokens or max(defaults.max_num_batched_tokens, asked.max_num_seqs or 0)
    num_seqs = asked.max_num_seqs or min(defaults.max_num_seqs, num_tokens)
    if num_tokens < num_seqs:
        raise StartError(f"max_num_batched_tokens {num_tokens} must be at least max_num_seqs {num_seqs}: each sequence gets a token")
    if asked.max_num_prefill_tokens is None:
        prefill = defaults.max_num_prefill_tokens, PREFILL_TOKENS_PER_DECODE, CONTEXT_TOKENS_PER_PREFILL_TOKEN
    else:
        prefill = asked.max_num_prefill_tokens, 0, 0
    return SchedulerLimits(num_seqs, num_tokens, asked.policy, asked.preemption_mode, *prefill, NUM_ROWS_AT_ONCE)


def swap_blocks(config: EngineConfig, limits: SchedulerLimits, device: torch.device, block_bytes: int) -> int:
    """Blocks of the pool in host memory; raises StartError where swapping was asked for and not even one fits."""
    num_blocks = swap_bytes(config, device) // block_bytes
    if limits.preemption_mode is PreemptionMode.SWAP and not num_blocks:
        raise StartError(f"preemption_mode swap needs a swap_space of at least one block, {block_bytes / GIB:.6f} GiB")
    return num_blocks


def swap_bytes(config: EngineConfig, device: torch.device) -> int:
    asked = config.cache.swap_space_bytes
    if asked is None:
        return DEFAULT_GPU_SWAP_BYTES if device.type == "cuda" else 0
    free = free_memory_bytes()
    if asked > free:
        raise StartError(f"swap_space {asked / GIB:.1f} GiB is more than the {free / GIB:.1f} GiB of free memory")
    return asked


def num_kv_blocks(
    cache: CacheConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, activation_bytes: int
) -> int:
    """How many blocks fit beside the activations of the largest step.

    Raises StartError if not even one does, or if more was asked for than there is.
    """
    per_block = bytes_per_block(shape, cache.block_size, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and the trial step have left in torch's own store is free, and would count as taken
        free, total = torch.cuda.mem_get_info(device)
        memory = int(total * cache.gpu_memory_utilization) - (total - free) - activation_bytes
    else:
        free = free_memory_bytes()
        memory = cache.kv_cache_memory_bytes or min(MOST_DEFAULT_CPU_CACHE_BYTES, free // 4)
        if memory > free:
            raise StartError(f"kv_cache_memory {memory / GIB:.1f} GiB is more than the {free / GIB:.1f} GiB of free memory")
    if cache.num_kv_blocks is not None:
        memory = cache.num_kv_blocks * per_block
        if memory > free:
            what = f"num_kv_blocks {cache.num_kv_blocks} takes {memory / GIB:.1f} GiB"
            raise StartError(f"{what}, and {free / GIB:.1f} GiB of memory are free")
        return cache.num_kv_blocks
    if memory < per_block:
        raise StartError(f"the KV cache has {max(memory, 0) / GIB:.2f} GiB and one block takes {per_block / GIB:.4f} GiB; give it more")
    return memory // per_block


def fitting_length(max_model_len: int, config: EngineConfig, num_blocks: int) -> int:
    """The length, lowered with a warning if not even one request of it fits the pool."""
    num_tokens = num_blocks * config.cache.block_size
    if num_tokens >= max_model_len:
        return max_model_len
    logger.warning("max_model_len lowered from %d to %d tokens: all that the KV cache holds", max_model_len, num_tokens)
    return num_tokens


def free_memory_bytes() -> int:
    """What can be had without swapping: caches of files count as free, where the system says how much that is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def weights_summary(shape: ModelShape) -> str:
    """One line: how many weights, in how much memory, held as what."""
    shares = ((name, count / shape.num_parameters) for name, count in shape.weights_held_as)
    formats = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= 0.005)
    return f"{shape.num_parameters / 1e6:,.1f} M weights in {shape.weight_bytes / 2**20:,.0f} MiB: {formats}"
