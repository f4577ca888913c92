"""The composition root: reads the config and chooses the parts.  Nowhere else is asked what is switched on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pagestream.engine.admission import QueueLimits
from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import EngineConfig, SchedulerLimits
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.features.structured.compiler import ConstraintCompiler
from pagestream.engine.features.structured.mask import ConstraintMask
from pagestream.engine.intake import Intake, Limits
from pagestream.engine.isolation import probe
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.metrics import EngineListener
from pagestream.engine.model_choice import Kernels, ModelChoice, find_kernels, with_fitting_dtype
from pagestream.engine.models.base import CausalLM
from pagestream.engine.models.checkpoint import Checkpoint, open_checkpoint
from pagestream.engine.models.cpu_decoder import CpuDecoder
from pagestream.engine.models.gguf_file import GgufFile
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
from pagestream.kernels.transfer import HostLink, PinnedLink, SharedMemory

if TYPE_CHECKING:  # they need Triton, which is not everywhere
    from pagestream.engine.runner.cuda_graphs import DecodeGraphs, GraphMaker
    from pagestream.engine.sampling.kernel_chooser import KernelChooser

DEFAULT_MAX_QUEUED_REQS = 1024

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
    chat_template = ChatTemplate(read_template(config.model.chat_template) or tokenizer.chat_template, tokenizer.special_tokens)
    kernels = find_kernels(config, device)
    checkpoint = with_fitting_dtype(checkpoint, config, kernels)
    model = ModelChoice(config, device, kernels).load(checkpoint)
    shape = model.shape
    limits = step_limits(config, device)
    sizes = find_sizes(config, model, limits, device)
    parts = step_parts(kernels, shape, device)
    cache = KVCache(
        shape, block_size=sizes.block_size, num_blocks=sizes.num_blocks, num_swap_blocks=sizes.num_swap_blocks,
        dtype=model.kv_dtype, device=device, mover=parts.mover,
    )  # fmt: skip
    injector = FaultInjector() if config.enable_fault_injection else None
    constraints = ConstraintCompiler(tokenizer, shape.vocab_size, shape.eos_token_ids)
    graphs = decode_graphs(config, model, cache, parts, limits, sizes.max_model_len)
    runner = ModelRunner(
        model, cache, Sampler(shape.eos_token_ids, [ConstraintMask(constraints)], parts.chooser), block_size=sizes.block_size,
        device=device, link=parts.link, injector=injector, graphs=graphs,
        best_tokens=model.best_tokens if isinstance(model, CpuDecoder) else None,
    )  # fmt: skip
    warm_up(runner, parts, sizes, limits, graphs)
    costs = measure_costs(
        runner, cache, parts.link, limits.max_num_batched_tokens, sizes.block_size, sizes.num_blocks, sizes.num_swap_blocks,
        sizes.max_model_len,
    )  # fmt: skip
    check_numbers(runner, config, checkpoint.dtype)
    blocks = BlockManager(
        sizes.num_blocks, sizes.block_size, num_swap_blocks=sizes.num_swap_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )  # fmt: skip
    engine = LLMEngine(
        intake=Intake(tokenizer, request_limits(config, shape, sizes, limits), config.model.seed, constraints.check),
        scheduler=Scheduler(limits, blocks, costs),
        executor=runner,
        outputs=OutputProcessor(tokenizer, shape.eos_token_ids, injector),
        listener=listener,
        block_bytes=sizes.block_bytes,
        count_compiled=compilation_count(kernels),
    )
    return BuiltEngine(
        engine=engine,
        shape=shape,
        tokenizer=tokenizer,
        chat_template=chat_template,
        queue_limits=QueueLimits(
            config.scheduler.max_num_queued_reqs or DEFAULT_MAX_QUEUED_REQS, config.scheduler.max_num_queued_tokens
        ),
        kv_summary=sizes.summary(),
        weights_summary=weights_summary(shape),
        dtype=checkpoint.dtype,
        cache_facts=cache_facts(config, str(model.kv_dtype).removeprefix("torch."), sizes),
        populate_cache=cache.populate,
        kv_bytes_per_token=sizes.block_bytes // sizes.block_size,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the pools, and of the longest request that they hold."""

    block_size: int  # tokens
    block_bytes: int
    num_blocks: int
    num_swap_blocks: int
    max_model_len: int

    def summary(self) -> str:
        num_tokens = self.num_blocks * self.block_size
        num_full = num_tokens / self.max_model_len
        return (
            f"{self.num_blocks:,} KV block{'s' * (self.num_blocks != 1)} of {self.block_size} tokens: {num_tokens:,} tokens, "
            f"{num_full:,.{1 if num_full < 100 else 0}f} requests of full length ({self.max_model_len:,} tokens)"
        )


def find_sizes(config: EngineConfig, model: CausalLM, limits: SchedulerLimits, device: torch.device) -> Sizes:
    """Raises StartError where not even one block fits."""
    shape, block_size = model.shape, config.cache.block_size
    block_bytes = bytes_per_block(shape, block_size, model.kv_dtype)
    num_blocks = num_kv_blocks(config.cache, shape, model.kv_dtype, device, activation_bytes(model, limits, config, device))
    max_model_len = fitting_length(longest_request(model, config), config, num_blocks)
    return Sizes(block_size, block_bytes, num_blocks, swap_blocks(config, limits, device, block_bytes), max_model_len)


def longest_request(model: CausalLM, config: EngineConfig) -> int:
    """Tokens that the operator wants and the model knows; the pool may have room for fewer."""
    return min(config.model.max_model_len or model.shape.max_model_len, model.shape.max_model_len)


def check_numbers(runner: ModelRunner, config: EngineConfig, dtype: torch.dtype) -> None:
    """Raises StartError for a model that gives no numbers, as the first request would find; writes into the pool's first block."""
    why = probe(runner, (0,))
    if why is not None:
        hint = "; its numbers may be too large for float16, try dtype bfloat16" if dtype == torch.float16 else "; its weights may be damaged"
        raise StartError(f"model {config.model.model} can't be served, {why}{hint}")


def request_limits(config: EngineConfig, shape: ModelShape, sizes: Sizes, limits: SchedulerLimits) -> Limits:
    return Limits(
        vocab_size=shape.vocab_size,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        policy=limits.policy,
        allows_faults=config.enable_fault_injection,
    )


def cache_facts(config: EngineConfig, dtype: str, sizes: Sizes) -> dict[str, str]:
    """By the names that vLLM's `cache_config_info` has for them."""
    cache = config.cache
    return {
        "block_size": str(cache.block_size),
        "cache_dtype": dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "num_gpu_blocks": str(sizes.num_blocks),
        "num_cpu_blocks": str(sizes.num_swap_blocks),
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
    return measure_activations(
        model, limits.max_num_batched_tokens, limits.max_num_seqs, config.cache.block_size, device, longest_request(model, config)
    )


@dataclass(frozen=True, slots=True)
class StepParts:
    """What executes a step besides the model."""

    kernels: Kernels
    device: torch.device
    link: HostLink
    mover: BlockMover | None = None  # None: plain torch
    chooser: KernelChooser | None = None  # None: the host draws


def step_parts(kernels: Kernels, shape: ModelShape, device: torch.device) -> StepParts:
    link: HostLink = SharedMemory() if device.type == "cpu" else PinnedLink(device)
    if kernels is not Kernels.TRITON:
        return StepParts(kernels, device, link)
    from pagestream.engine.runner.block_mover import KernelMover
    from pagestream.engine.sampling.kernel_chooser import KernelChooser

    chooser = KernelChooser(link, shape.vocab_size, device)
    return StepParts(kernels, device, link, KernelMover(link, device), chooser)


def warm_up(
    runner: ModelRunner, parts: StepParts, sizes: Sizes, limits: SchedulerLimits, graphs: DecodeGraphs | None
) -> None:
    """Compile and capture what steps will need, so that no request waits for it."""
    if parts.kernels is Kernels.TRITON and parts.device.type == "cuda":  # the interpreter compiles nothing
        from pagestream.engine.runner.warm_up import compile_kernels

        compile_kernels(
            runner, block_size=sizes.block_size, num_blocks=sizes.num_blocks, num_swap_blocks=sizes.num_swap_blocks,
            max_num_seqs=limits.max_num_seqs, max_num_tokens=limits.max_num_batched_tokens,
        )  # fmt: skip
    if graphs is not None:
        graphs.capture()


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
    config: EngineConfig, model: CausalLM, cache: KVCache, parts: StepParts, limits: SchedulerLimits, max_model_len: int
) -> DecodeGraphs | None:
    """Decode steps of the lean decoder, to be captured; what transformers' modules do in between may not be captured."""
    maker = graph_maker(parts.device)
    if maker is None or parts.chooser is None or config.enforce_eager or config.enable_fault_injection:
        return None
    from pagestream.engine.models.triton_decoder import TritonDecoder
    from pagestream.engine.runner.cuda_graphs import DecodeGraphs

    if not isinstance(model, TritonDecoder):
        return None
    return DecodeGraphs(
        model, cache, parts.chooser, parts.link, block_size=config.cache.block_size, max_num_seqs=limits.max_num_seqs,
        max_context_len=min(max_model_len, config.max_context_len_to_capture), device=parts.device, maker=maker,
    )  # fmt: skip
