"""Which model computes a checkpoint, and by what: the part of the composition root that knows the models."""

from __future__ import annotations

import dataclasses
import functools
import os
from enum import Enum

import torch

from pagestream.engine.attention.base import AttentionBackend
from pagestream.engine.attention.cpu_backend import CpuAttentionBackend
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.config import EngineConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import CausalLM
from pagestream.engine.models.checkpoint import Checkpoint
from pagestream.engine.models.cpu_decoder import CpuDecoder
from pagestream.engine.models.cpu_linear import CpuLinearMaker, hold_packed
from pagestream.engine.models.decoder import TorchDecoder
from pagestream.engine.models.decoder_config import decoder_spec
from pagestream.engine.models.linear import LinearMakers
from pagestream.engine.models.linear_blocks import HEAD_BITS, BlocksMaker, HoldBlocks, Quantise, hold_unpacked
from pagestream.engine.models.loader import load_decoder
from pagestream.kernels.block_quantise import quantise
from pagestream.kernels.cpu.ops import load_ops, supports_pages
from pagestream.kernels.kv_format import SCALE_BYTES, is_quantised

KV_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
FIRST_WITH_FP8 = (8, 9)  # compute capability


class Kernels(Enum):
    """Who computes: the compiled operators of kernels/cpu, plain torch, or the Triton kernels."""

    CPU = "cpu"
    TORCH = "torch"
    TRITON = "triton"


def find_kernels(config: EngineConfig, device: torch.device) -> Kernels:
    """The one place that chooses them.  Triton on a CPU means its interpreter, which is for tests."""
    if config.kernels == "torch":
        return Kernels.TORCH
    if config.kernels == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise StartError("kernels triton needs a GPU, or TRITON_INTERPRET=1 to be tried without one")
    if config.kernels == "triton" or device.type == "cuda":
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what the kernels were measured with; the default is to change
        check_kv_dtype_on_gpu(config, device)
        return Kernels.TRITON
    return Kernels.CPU


def check_kv_dtype_on_gpu(config: EngineConfig, device: torch.device) -> None:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if config.cache.dtype == "fp8" and is_nvidia and torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        raise StartError("kv_cache_dtype fp8 is not supported on this GPU, which has no 8-bit floats; use int8")


def with_fitting_dtype(checkpoint: Checkpoint, config: EngineConfig, kernels: Kernels) -> Checkpoint:
    """The CPU operators compute converted weights in bfloat16, whatever the checkpoint has.  Raises StartError for another dtype."""
    if checkpoint.bits is None or kernels is not Kernels.CPU:
        return checkpoint
    if config.model.dtype not in ("auto", "bfloat16"):
        raise StartError(
            f"quantization {config.model.quantization} computes in bfloat16 on a CPU, not in dtype {config.model.dtype}; leave one of them out"
        )
    return dataclasses.replace(checkpoint, dtype=torch.bfloat16)


class ModelChoice:
    """Loads a checkpoint as the model that serves it best on this device."""

    def __init__(self, config: EngineConfig, device: torch.device, kernels: Kernels):
        self._config = config
        self._device = device
        self._kernels = kernels
        self._ops = load_ops(config.cpu_threads) if kernels is Kernels.CPU else None
        self._kv_dtype = None if config.cache.dtype == "auto" else KV_DTYPES[config.cache.dtype]

    def load(self, checkpoint: Checkpoint) -> CausalLM:
        """Raises StartError for what can't be served rightly."""
        model = self._lean_decoder(checkpoint) if checkpoint.is_decoder else self._of_transformers(checkpoint)
        check_head_size(model.shape, model.kv_dtype)
        return model

    def _of_transformers(self, checkpoint: Checkpoint) -> CausalLM:
        from pagestream.engine.models.hf import load_transformers

        model = load_transformers(
            checkpoint,
            self._config.model,
            device=self._device,
            dtype=checkpoint.dtype,
            attention=TorchAttention(),
            kv_dtype=self._kv_dtype,
            linears=self._linear_makers(checkpoint),
        )
        # Its head size is only known now, and its length: their configs have many names for it.
        longest = self._config.model.max_model_len or model.shape.max_model_len
        model.attention = self._attention(longest, takes_pages=self._takes_pages(model.kv_dtype, model.shape.head_size))
        return model

    def _lean_decoder(self, checkpoint: Checkpoint) -> CausalLM:
        ops, kv_dtype = self._ops, self._kv_dtype
        # The operators hold float16 weights as float32, and then the pages too unless they were asked for otherwise.
        page_dtype = kv_dtype or (torch.float32 if checkpoint.dtype == torch.float16 else checkpoint.dtype)
        head_size = decoder_spec(checkpoint.config, checkpoint.max_model_len).head_size
        is_fused = self._takes_pages(page_dtype, head_size)
        # The operators compute with a file's own blocks what its dequantised weights would give in bfloat16, bit for bit.
        reads_blocks = self._kernels is Kernels.TRITON or is_fused and checkpoint.dtype == torch.bfloat16
        loaded = load_decoder(
            checkpoint, device=self._device, dtype=checkpoint.dtype, reads_blocks=reads_blocks, quantise=self._quantise()
        )
        if ops is not None and is_fused:
            return CpuDecoder(loaded.spec, loaded.weights, loaded.shape, ops, kv_dtype=kv_dtype)
        max_model_len = self._config.model.max_model_len or loaded.shape.max_model_len
        if self._kernels is Kernels.TRITON:
            from pagestream.engine.attention.triton_backend import TritonAttention
            from pagestream.engine.models.triton_decoder import TritonDecoder

            fused = TritonAttention(max_seq_len=max_model_len)
            return TritonDecoder(loaded.spec, loaded.weights, loaded.shape, fused, max_model_len=max_model_len, kv_dtype=kv_dtype)
        attention = TorchAttention()
        return TorchDecoder(loaded.spec, loaded.weights, loaded.shape, attention, max_model_len=max_model_len, kv_dtype=kv_dtype)

    def _takes_pages(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether the operators read such pages."""
        return self._ops is not None and supports_pages(dtype, head_size, self._config.cache.block_size)

    def _attention(self, max_model_len: int, *, takes_pages: bool) -> AttentionBackend:
        if self._kernels is Kernels.TRITON:
            from pagestream.engine.attention.triton_backend import TritonAttention

            return TritonAttention(max_seq_len=max_model_len)
        return CpuAttentionBackend(self._ops) if self._ops is not None and takes_pages else TorchAttention()

    def _quantise(self) -> Quantise:
        device = self._device
        return self._ops.quantise if self._ops is not None else lambda weight, kind: quantise(weight.to(device), kind)

    def _linear_makers(self, checkpoint: Checkpoint) -> LinearMakers | None:
        """What a model of transformers has in place of its own linears; None: what plain torch has."""
        ops = self._ops
        if checkpoint.bits is None:
            return None if ops is None else LinearMakers(CpuLinearMaker(ops), CpuLinearMaker(ops))
        if ops is not None:
            hold: HoldBlocks = functools.partial(hold_packed, ops)
        elif self._kernels is Kernels.TRITON:
            from pagestream.engine.models.triton_linear import hold_blocks

            hold = functools.partial(hold_blocks, device=self._device, dtype=checkpoint.dtype)
        else:
            hold = functools.partial(hold_unpacked, device=self._device, dtype=checkpoint.dtype)
        make = BlocksMaker(self._quantise(), checkpoint.bits, hold)
        return LinearMakers(make, BlocksMaker(self._quantise(), HEAD_BITS, hold))


def check_head_size(shape: ModelShape, kv_dtype: torch.dtype) -> None:
    """Raises StartError for heads that pages of 8 bits can't hold."""
    if is_quantised(kv_dtype) and shape.head_size % SCALE_BYTES:
        raise StartError(
            f"kv_cache_dtype fp8 and int8 need heads of a multiple of {SCALE_BYTES} elements; this model's have {shape.head_size}"
        )
