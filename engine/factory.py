"""The composition root: reads the config and chooses the parts.  Nowhere else is asked what is switched on."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from pagestream.engine.admission import QueueLimits
from pagestream.engine.attention.base import AttentionBackend
from pagestream.engine.attention.cpu_backend import CpuAttentionBackend
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import EngineConfig, SchedulerLimits
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.sampling_params import MAX_NUM_SEQUENCES
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.features.structured.compiler import ConstraintCompiler
from pagestream.engine.features.structured.mask import ConstraintMask
from pagestream.engine.intake import Intake, Limits
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.metrics import EngineListener
from pagestream.engine.models.base import CausalLM
from pagestream.engine.models.cpu_decoder import CpuDecoder
from pagestream.engine.models.cpu_linear import CpuLinearMaker, hold_packed
from pagestream.engine.models.decoder import TorchDecoder
from pagestream.engine.models.decoder_config import decoder_spec, max_positions, with_defaults
from pagestream.engine.models.gguf_file import GgufFile
from pagestream.engine.models.linear import LinearMakers
from pagestream.engine.models.linear_blocks import HEAD_BITS, BlocksMaker, HoldBlocks, Quantise, hold_unpacked
from pagestream.engine.models.loader import Checkpoint, load_decoder, open_checkpoint
from pagestream.engine.output_processor import OutputProcessor
from pagestream.engine.runner.fault_injection import FaultInjector
from pagestream.engine.runner.kv_cache import BlockMover, KVCache, bytes_per_block
from pagestream.engine.runner.model_runner import ModelRunner
from pagestream.engine.runner.profiling import measure_activations, measure_costs
from pagestream.engine.sampling.sampler import Sampler
from pagestream.engine.sizing import fitting_length, num_kv_blocks, step_limits, swap_blocks, weights_summary
from pagestream.engine.text.chat_template import ChatTemplate, read_template
from pagestream.engine.text.gguf_tokenizer import from_gguf_metadata
from pagestream.engine.text.tokenizer import Tokenizer, load_tokenizer
from pagestream.kernels.block_quantise import quantise
from pagestream.kernels.cpu.ops import CpuOps, load_ops, supports_pages
from pagestream.kernels.kv_format import SCALE_BYTES, is_quantised
from pagestream.kernels.transfer import HostLink, PinnedLink, SharedMemory

if TYPE_CHECKING:  # they need Triton, which is not everywhere
    from pagestream.engine.runner.cuda_graphs import DecodeGraphs, GraphMaker
    from pagestream.engine.sampling.kernel_chooser import KernelChooser

DEFAULT_MAX_QUEUED_REQS = 1024
KV_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
FIRST_WITH_FP8 = (8, 9)  # compute capability
USUAL_HEAD_SIZE = 64  # any that the operators take: a model's own is only known once it is loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: LLMEngine
    shape: ModelShape
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    queue_limits: QueueLimits
    kv_summary: str
    weights_summary: str
    dtype: torch.dtype  # of the weights, quantised ones once unpacked
    kv_bytes_per_token: int
    populate_cache: Callable[[Callable[[], bool]], None]  # KVCache.populate; may be called from any thread, or never
    cache_facts: dict[str, str] = field(default_factory=dict)  # how the cache was set up, for those who watch


def build_engine(config: EngineConfig, listener: EngineListener | None = None) -> BuiltEngine:
    """Load, size and warm up.  Raises StartError with one line that says what to do."""
    if config.model.trust_remote_code:
        logger.warning("trust_remote_code is on: code that comes with %s runs with all rights of this process", config.model.model)
    device = find_device(config)
    checkpoint = open_checkpoint(config.model)
    tokenizer = find_tokenizer(checkpoint, config)
    kernels = find_kernels(config, device)
    checkpoint = with_fitting_dtype(checkpoint, config, kernels)
    model = load_model(checkpoint, config, device, kernels)
    shape = model.shape
    check_head_size(shape, model.kv_dtype)
    limits = step_limits(config, device)
    max_model_len = min(config.model.max_model_len or shape.max_model_len, shape.max_model_len)
    num_blocks = num_kv_blocks(config.cache, shape, model.kv_dtype, device, activation_bytes(model, limits, config, device))
    max_model_len = fitting_length(max_model_len, config, num_blocks)
    block_size = config.cache.block_size
    num_swap_blocks = swap_blocks(config, limits, device, bytes_per_block(shape, block_size, model.kv_dtype))
    parts = step_parts(kernels, shape, limits, device)
    cache = KVCache(
        shape, block_size=block_size, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks, dtype=model.kv_dtype, device=device,
        mover=parts.mover,
    )  # fmt: skip
    blocks = BlockManager(
        num_blocks, block_size, num_swap_blocks=num_swap_blocks, enable_prefix_caching=config.cache.enable_prefix_caching
    )
    injector = FaultInjector() if config.enable_fault_injection else None
    constraints = ConstraintCompiler(tokenizer, shape.vocab_size, shape.eos_token_ids)
    sampler = Sampler(shape.eos_token_ids, [ConstraintMask(constraints)], parts.chooser)
    graphs = decode_graphs(config, model, cache, parts, limits, max_model_len, device)
    runner = ModelRunner(
        model, cache, sampler, block_size=block_size, device=device, link=parts.link, injector=injector, graphs=graphs,
        best_tokens=model.best_tokens if isinstance(model, CpuDecoder) else None,
    )  # fmt: skip
    if kernels is Kernels.TRITON and device.type == "cuda":  # the interpreter compiles nothing
        from pagestream.engine.runner.warm_up import compile_kernels

        compile_kernels(
            runner, block_size=block_size, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks,
            max_num_seqs=limits.max_num_seqs, max_num_tokens=limits.max_num_batched_tokens,
        )  # fmt: skip
    if graphs is not None:
        graphs.capture()
    costs = measure_costs(runner, cache, parts.link, limits.max_num_batched_tokens, block_size, num_blocks, num_swap_blocks)
    engine = LLMEngine(
        intake=Intake(
            tokenizer,
            Limits(
                vocab_size=shape.vocab_size,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=limits.max_num_seqs,
                policy=limits.policy,
                allows_faults=config.enable_fault_injection,
            ),
            config.model.seed,
            constraints.check,
        ),
        scheduler=Scheduler(limits, blocks, costs),
        executor=runner,
        outputs=OutputProcessor(tokenizer, shape.eos_token_ids, injector),
        listener=listener,
        block_bytes=bytes_per_block(shape, block_size, model.kv_dtype),
        count_compiled=compilation_count(kernels),
    )
    num_tokens = num_blocks * block_size
    return BuiltEngine(
        engine=engine,
        shape=shape,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(read_template(config.model.chat_template) or tokenizer.chat_template, tokenizer.special_tokens),
        queue_limits=QueueLimits(
            config.scheduler.max_num_queued_reqs or DEFAULT_MAX_QUEUED_REQS, config.scheduler.max_num_queued_tokens
        ),
        kv_summary=(
            f"{num_blocks:,} KV blocks of {block_size} tokens: {num_tokens:,} tokens, "
            f"{num_tokens / max_model_len:.1f} requests of full length ({max_model_len:,} tokens)"
        ),
        weights_summary=weights_summary(shape),
        dtype=checkpoint.dtype,
        cache_facts=cache_facts(config, str(model.kv_dtype).removeprefix("torch."), num_blocks, num_swap_blocks),
        populate_cache=cache.populate,
        kv_bytes_per_token=bytes_per_block(shape, block_size, model.kv_dtype) // block_size,
    )


def cache_facts(config: EngineConfig, dtype: str, num_blocks: int, num_swap_blocks: int) -> dict[str, str]:
    """By the names that vLLM's `cache_config_info` has for them."""
    cache = config.cache
    return {
        "block_size": str(cache.block_size),
        "cache_dtype": dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "num_gpu_blocks": str(num_blocks),
        "num_cpu_blocks": str(num_swap_blocks),
    }


def find_device(config: EngineConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise StartError("device cuda was asked for, but there is no GPU that torch can use; leave --device out or give cpu")
    return torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")


def find_tokenizer(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    path = checkpoint.files.tokenizer
    if path.is_dir():
        return load_tokenizer(path, mode=config.model.tokenizer_mode, trust_remote_code=config.model.trust_remote_code)
    file = GgufFile(path)
    return from_gguf_metadata({key: file.get(key) for key in file.values if key.startswith("tokenizer.")})


def activation_bytes(model: CausalLM, limits: SchedulerLimits, config: EngineConfig, device: torch.device) -> int:
    """What the largest step needs besides the cache, by trying it; not asked on a CPU, whose cache has a size of its own."""
    if device.type != "cuda" or config.cache.num_kv_blocks is not None:
        return 0
    return measure_activations(model, limits.max_num_batched_tokens, limits.max_num_seqs, config.cache.block_size, device)


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


@dataclass(frozen=True, slots=True)
class StepParts:
    """What executes a step besides the model."""

    link: HostLink
    mover: BlockMover | None  # None: plain torch
    chooser: KernelChooser | None  # None: the host draws


def step_parts(kernels: Kernels, shape: ModelShape, limits: SchedulerLimits, device: torch.device) -> StepParts:
    link: HostLink = SharedMemory() if device.type == "cpu" else PinnedLink(device)
    if kernels is not Kernels.TRITON:
        return StepParts(link, None, None)
    from pagestream.engine.runner.block_mover import KernelMover
    from pagestream.engine.sampling.kernel_chooser import KernelChooser

    chooser = KernelChooser(link, shape.vocab_size, limits.max_num_seqs * MAX_NUM_SEQUENCES, device)
    return StepParts(link, KernelMover(link, device), chooser)


def compilation_count(kernels: Kernels) -> Callable[[], int]:
    """How many kernels have been compiled since; to be called when all are that should be needed."""
    if kernels is not Kernels.TRITON:
        return lambda: 0
    from pagestream.kernels.compilation import CompilationCounter

    counter = CompilationCounter()
    return lambda: counter.num_compiled


def graph_maker(device: torch.device) -> GraphMaker | None:
    """None where there are no graphs."""
    if device.type != "cuda":
        return None
    from pagestream.engine.runner.cuda_graphs import CudaGraphMaker

    return CudaGraphMaker()


def decode_graphs(
    config: EngineConfig,
    model: CausalLM,
    cache: KVCache,
    parts: StepParts,
    limits: SchedulerLimits,
    max_model_len: int,
    device: torch.device,
) -> DecodeGraphs | None:
    """Decode steps of the lean decoder, to be captured; what transformers' modules do in between may not be captured."""
    maker = graph_maker(device)
    if maker is None or parts.chooser is None or config.enforce_eager or config.enable_fault_injection:
        return None
    from pagestream.engine.models.triton_decoder import TritonDecoder
    from pagestream.engine.runner.cuda_graphs import DecodeGraphs

    if not isinstance(model, TritonDecoder):
        return None
    return DecodeGraphs(
        model, cache, parts.chooser, parts.link, block_size=config.cache.block_size, max_num_seqs=limits.max_num_seqs,
        max_context_len=min(max_model_len, config.max_context_len_to_capture), device=device, maker=maker,
    )  # fmt: skip


def attention_backend(kernels: Kernels, ops: CpuOps | None, max_model_len: int) -> AttentionBackend:
    if kernels is Kernels.TRITON:
        from pagestream.engine.attention.triton_backend import TritonAttention

        return TritonAttention(max_seq_len=max_model_len)
    return TorchAttention() if ops is None else CpuAttentionBackend(ops)


def load_model(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, kernels: Kernels) -> CausalLM:
    kv_dtype = None if config.cache.dtype == "auto" else KV_DTYPES[config.cache.dtype]
    ops = load_ops(config.cpu_threads) if kernels is Kernels.CPU else None
    if checkpoint.is_decoder:
        return load_lean_decoder(checkpoint, config, device, kernels, ops, kv_dtype)
    from pagestream.engine.models.hf import load_transformers

    longest = config.model.max_model_len or max_positions(with_defaults(checkpoint.config))
    takes_pages = supports_pages(kv_dtype or checkpoint.dtype, USUAL_HEAD_SIZE, config.cache.block_size)
    attention = attention_backend(kernels, ops if takes_pages else None, longest)
    return load_transformers(
        checkpoint,
        config.model,
        device=device,
        dtype=checkpoint.dtype,
        attention=attention,
        kv_dtype=kv_dtype,
        linears=linear_makers(checkpoint, device, kernels, ops),
    )


def quantiser(device: torch.device, ops: CpuOps | None) -> Quantise:
    return ops.quantise if ops is not None else lambda weight, kind: quantise(weight.to(device), kind)


def linear_makers(checkpoint: Checkpoint, device: torch.device, kernels: Kernels, ops: CpuOps | None) -> LinearMakers | None:
    """What a model of transformers has in place of its own linears; None: what plain torch has."""
    if checkpoint.bits is None:
        return None if ops is None else LinearMakers(CpuLinearMaker(ops), CpuLinearMaker(ops))
    if ops is not None:
        hold: HoldBlocks = functools.partial(hold_packed, ops)
    elif kernels is Kernels.TRITON:
        from pagestream.engine.models.triton_linear import hold_blocks

        hold = functools.partial(hold_blocks, device=device, dtype=checkpoint.dtype)
    else:
        hold = functools.partial(hold_unpacked, device=device, dtype=checkpoint.dtype)
    make = BlocksMaker(quantiser(device, ops), checkpoint.bits, hold)
    return LinearMakers(make, BlocksMaker(quantiser(device, ops), HEAD_BITS, hold))


def with_fitting_dtype(checkpoint: Checkpoint, config: EngineConfig, kernels: Kernels) -> Checkpoint:
    """The CPU operators compute converted weights in bfloat16, whatever the checkpoint has.  Raises StartError for another dtype."""
    if checkpoint.bits is None or kernels is not Kernels.CPU:
        return checkpoint
    if config.model.dtype not in ("auto", "bfloat16"):
        raise StartError(
            f"quantization {config.model.quantization} computes in bfloat16 on a CPU, not in dtype {config.model.dtype}; leave one of them out"
        )
    return dataclasses.replace(checkpoint, dtype=torch.bfloat16)


def load_lean_decoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    kernels: Kernels,
    ops: CpuOps | None,
    kv_dtype: torch.dtype | None,
) -> CausalLM:
    # The operators hold float16 weights as float32, and then the pages too unless they were asked for otherwise.
    page_dtype = kv_dtype or (torch.float32 if checkpoint.dtype == torch.float16 else checkpoint.dtype)
    head_size = decoder_spec(checkpoint.config, checkpoint.max_model_len).head_size
    is_fused = ops is not None and supports_pages(page_dtype, head_size, config.cache.block_size)
    # The operators compute with a file's own blocks what its dequantised weights would give in bfloat16, bit for bit.
    reads_blocks = kernels is Kernels.TRITON or is_fused and checkpoint.dtype == torch.bfloat16
    loaded = load_decoder(
        checkpoint, device=device, dtype=checkpoint.dtype, reads_blocks=reads_blocks, quantise=quantiser(device, ops)
    )
    if ops is not None and is_fused:
        return CpuDecoder(loaded.spec, loaded.weights, loaded.shape, ops, kv_dtype=kv_dtype)
    max_model_len = config.model.max_model_len or loaded.shape.max_model_len
    if kernels is Kernels.TRITON:
        from pagestream.engine.attention.triton_backend import TritonAttention
        from pagestream.engine.models.triton_decoder import TritonDecoder

        fused = TritonAttention(max_seq_len=max_model_len)
        return TritonDecoder(loaded.spec, loaded.weights, loaded.shape, fused, max_model_len=max_model_len, kv_dtype=kv_dtype)
    attention = attention_backend(kernels, None, max_model_len)
    return TorchDecoder(loaded.spec, loaded.weights, loaded.shape, attention, max_model_len=max_model_len, kv_dtype=kv_dtype)


def check_head_size(shape: ModelShape, kv_dtype: torch.dtype) -> None:
    """Raises StartError for heads that pages of 8 bits can't hold."""
    if is_quantised(kv_dtype) and shape.head_size % SCALE_BYTES:
        raise StartError(
            f"kv_cache_dtype fp8 and int8 need heads of a multiple of {SCALE_BYTES} elements; this model's have {shape.head_size}"
        )
