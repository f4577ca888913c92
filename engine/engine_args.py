"""The flat list of options that the command line and `LLM(...)` take, and the way to the engine's config."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, fields
from typing import Any

from pagestream.engine.core.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    choose,
)
from pagestream.engine.core.errors import StartError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Names as vLLM's users know them.  Sizes in GiB where the name says no other unit."""

    model: str = "smollm2"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    chat_template: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    seed: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: float | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    swap_space: float | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_prefill_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "auto"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False
    device: str = "auto"
    kernels: str = "auto"
    enforce_eager: bool = False
    max_context_len_to_capture: int = 8192
    cpu_threads: int | None = None
    enable_fault_injection: bool = False

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineArgs:
        """Raises StartError naming an option that does not exist, with the nearest one that does."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise StartError(f"unknown engine option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**{name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()})

    def to_config(self) -> EngineConfig:
        """Raises StartError naming the option whose value can't be used."""
        for field in fields(self):
            check_kind(field.name, getattr(self, field.name), str(field.type))
        choose("scheduling_policy", self.scheduling_policy, tuple(policy.value for policy in SchedulingPolicy))
        choose("preemption_mode", self.preemption_mode, tuple(mode.value for mode in PreemptionMode))
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer,
                tokenizer_mode=self.tokenizer_mode,
                chat_template=self.chat_template,
                trust_remote_code=self.trust_remote_code,
                revision=self.revision,
                tokenizer_revision=self.tokenizer_revision,
                dtype=self.dtype,
                quantization=self.quantization or "auto",
                load_format=self.load_format,
                max_model_len=self.max_model_len,
                seed=self.seed,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_kv_blocks=self.num_kv_blocks,
                kv_cache_memory_bytes=as_bytes("kv_cache_memory", self.kv_cache_memory),
                gpu_memory_utilization=self.gpu_memory_utilization,
                swap_space_bytes=as_bytes("swap_space", self.swap_space),
                enable_prefix_caching=self.enable_prefix_caching,
                dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_prefill_tokens=self.max_num_prefill_tokens,
                policy=SchedulingPolicy(self.scheduling_policy),
                preemption_mode=PreemptionMode(self.preemption_mode),
                max_num_queued_reqs=self.max_num_queued_reqs,
                max_num_queued_tokens=self.max_num_queued_tokens,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                disable_custom_all_reduce=self.disable_custom_all_reduce,
            ),
            device=self.device,
            kernels=self.kernels,
            enforce_eager=self.enforce_eager,
            max_context_len_to_capture=self.max_context_len_to_capture,
            cpu_threads=self.cpu_threads,
            enable_fault_injection=self.enable_fault_injection,
        )


KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # by how a field is annotated
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
}


def check_kind(name: str, value: object, annotation: str) -> None:
    """Raises StartError for a value of another kind: a text is no number, and "no" would count as true."""
    kind, _, rest = annotation.partition(" | ")
    types, what = KINDS[kind]
    if value is None and rest:
        return
    if not isinstance(value, types) or isinstance(value, bool) and kind != "bool":
        raise StartError(f"{name} must be {what}, not {value!r}"[:200])


def as_bytes(name: str, gib: float | None) -> int | None:
    """Raises StartError for what is no size at all."""
    if gib is not None and not math.isfinite(gib):
        raise StartError(f"{name} must be a number of GiB, not {gib}")
    return None if gib is None else round(gib * GIB)
