"""What the operator asked for: small frozen parts, each validated on its own.  Unset values are None until the device is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagestream.engine.core.errors import StartError

MAX_SWAP_SPACE_BYTES = 1 << 42
MAX_CPU_THREADS = 1024  # far more than pay; what a system refuses to start would end the process without a word of ours


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class PreemptionMode(Enum):
    """What happens to the blocks of a preempted group: kept in the swap pool, thrown away, or whichever costs less."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights and tokenizer, and how to hold them."""

    model: str = "smollm2"
    tokenizer: str | None = None  # None: the model's own
    tokenizer_mode: str = "auto"  # auto | slow
    chat_template: str | None = None  # a file; None: the model's own
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: str = "auto"  # auto: a GGUF file's own blocks | none: unpacked | int8 | int4: converted at load
    load_format: str = "auto"  # auto | safetensors | gguf | dummy
    max_model_len: int | None = None  # tokens of prompt and answer together; None: the model's own
    seed: int | None = None  # of unseeded requests and dummy weights; None: fresh randomness for every request

    def __post_init__(self) -> None:
        choose("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        choose("quantization", self.quantization, ("auto", "none", "int8", "int4"))
        choose("load_format", self.load_format, ("auto", "safetensors", "gguf", "dummy"))
        choose("tokenizer_mode", self.tokenizer_mode, ("auto", "slow"))
        if self.max_model_len is not None and self.max_model_len < 2:
            raise StartError(f"max_model_len must be at least 2, not {self.max_model_len}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: blocks of `block_size` tokens, in one pool per device."""

    block_size: int = 16  # tokens; a multiple of 16
    num_kv_blocks: int | None = None  # by hand; None: what memory allows
    kv_cache_memory_bytes: int | None = None  # CPU; None: 2 GiB or a quarter of free memory, whichever is less
    gpu_memory_utilization: float = 0.9
    swap_space_bytes: int | None = None  # None: 4 GiB on a GPU, 0 on a CPU
    enable_prefix_caching: bool = True
    dtype: str = "auto"  # of the cached keys and values; auto: the model's

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise StartError(f"block_size must be a multiple of 16, not {self.block_size}")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 1:
            raise StartError(f"num_kv_blocks must be at least 1, not {self.num_kv_blocks}")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise StartError(f"kv_cache_memory must be positive, not {self.kv_cache_memory_bytes}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise StartError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if self.swap_space_bytes is not None and not 0 <= self.swap_space_bytes <= MAX_SWAP_SPACE_BYTES:
            raise StartError(f"swap_space must be between 0 and {MAX_SWAP_SPACE_BYTES >> 30} GiB, not {self.swap_space_bytes / 2**30:g}")
        choose("kv_cache_dtype", self.dtype, ("auto", "float32", "bfloat16", "float16", "fp8", "int8"))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step computes, and who goes first."""

    max_num_seqs: int | None = None  # sequences per step; None: 64 on a CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None  # tokens per step; None: 512 on a CPU, 8192 on a GPU
    max_num_prefill_tokens: int | None = None  # prompt tokens per step while others decode; None: see sizing.py
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    max_num_queued_reqs: int | None = None  # waiting requests; None: 1024
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting requests; None: no limit of its own

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens", "max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The same, resolved for the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    max_num_prefill_tokens: int | None = None  # of a step in which somebody decodes; None: whatever the budget leaves
    # More where those who decode make a step long themselves: so many for each, and one for so many tokens of context (0: none).
    num_prefill_tokens_per_decode: int = 0
    num_context_tokens_per_prefill_token: int = 0
    num_rows_at_once: int = 1  # such a step is a multiple of so many tokens where it can be: of what the device multiplies at once


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise StartError(f"tensor_parallel_size {self.tensor_parallel_size} is not supported: this engine runs on one device")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it, with the device it runs on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: str = "auto"  # auto | cpu | cuda
    kernels: str = "auto"  # auto: those made for the device | torch: none, to compare with | triton
    enforce_eager: bool = False
    max_context_len_to_capture: int = 8192
    cpu_threads: int | None = None  # None: one per core
    enable_fault_injection: bool = False

    def __post_init__(self) -> None:
        choose("device", self.device, ("auto", "cpu", "cuda"))
        choose("kernels", self.kernels, ("auto", "torch", "triton"))
        if self.max_context_len_to_capture < 1:
            raise StartError(f"max_context_len_to_capture must be at least 1, not {self.max_context_len_to_capture}")
        if self.cpu_threads is not None and not 1 <= self.cpu_threads <= MAX_CPU_THREADS:
            raise StartError(f"cpu_threads must be from 1 to {MAX_CPU_THREADS}, not {self.cpu_threads}")


def choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises StartError unless the value is one of those allowed."""
    if value not in allowed:
        raise StartError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
