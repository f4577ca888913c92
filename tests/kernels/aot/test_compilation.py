"""All kernels that serving reaches are compiled before it, with a driver that compiles and never launches."""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagestream.engine.attention.triton_backend import TritonAttention
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted, BlockCopy, Sample, ScheduledSequence, StepPlan
from pagestream.engine.metrics import StepStats
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, RotarySpec
from pagestream.engine.models.triton_decoder import TritonDecoder
from pagestream.engine.runner.block_mover import KernelMover
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.engine.runner.model_runner import ModelRunner
from pagestream.engine.runner.warm_up import compile_kernels
from pagestream.engine.sampling.kernel_chooser import KernelChooser
from pagestream.engine.sampling.sampler import Sampler
from pagestream.engine.watch import RequestWatch
from pagestream.kernels.bench_cases import elementwise_cases
from pagestream.kernels.compilation import CompilationCounter, compile_noted, launches_noted
from pagestream.kernels.reshape_and_cache import reshape_and_cache
from pagestream.kernels.static_analysis import TARGETS, CompileOnlyDriver, launches_compiled
from pagestream.kernels.transfer import Array, PinnedLink

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, SIZE, VOCAB, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 64, 4, 1, 64, 320, 40, 16, 300, 512
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
    SamplingParams(logprobs=2, presence_penalty=1.0),
    SamplingParams(logit_bias={3: 1.0}, min_tokens=3),
]


class UnpinnedLink(PinnedLink):
    """The link to a GPU without one: the same packing, nothing pinned, nobody to wait for.

    No kernel has run, so what comes back is replaced by numbers of the right kind.
    """

    def __init__(self) -> None:
        super().__init__(CPU, pinned=False)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        return [np.zeros(tuple(tensor.shape), array.dtype) for tensor, array in zip(tensors, super().fetch(tensors), strict=True)]

    def wait(self) -> None:
        """Nothing is under way."""


def make_model(kv_dtype: torch.dtype) -> TritonDecoder:
    """Zeros of bfloat16, two layers of which one has a window."""

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.bfloat16)

    layers = [
        LayerWeights(
            input_norm=zeros(HIDDEN), qkv=zeros((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), qkv_bias=None, q_norm=None, k_norm=None,
            o=zeros(HIDDEN, HEADS * SIZE), o_bias=None, post_norm=zeros(HIDDEN), gate_up=zeros(192, HIDDEN), down=zeros(HIDDEN, 96),
        )
        for _ in range(2)
    ]  # fmt: skip
    spec = DecoderSpec(
        hidden_size=HIDDEN, intermediate_size=96, num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE,
        vocab_size=VOCAB, rms_norm_eps=1e-5, rotary=RotarySpec(torch.ones(SIZE // 2), SIZE), attention_scale=0.125, windows=(None, 24),
    )  # fmt: skip
    shape = ModelShape(
        vocab_size=VOCAB, max_model_len=512, num_layers=2, num_kv_heads=KV_HEADS, head_size=SIZE, eos_token_ids=frozenset({2})
    )
    embedding = zeros(VOCAB, HIDDEN)
    weights = DecoderWeights(embedding, layers, zeros(HIDDEN), embedding)
    return TritonDecoder(spec, weights, shape, TritonAttention(max_seq_len=512, num_slots=64), kv_dtype=kv_dtype)


def make_runner(kv_dtype: torch.dtype) -> ModelRunner:
    link = UnpinnedLink()
    model = make_model(kv_dtype)
    cache = KVCache(
        model.shape, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_swap_blocks=4, dtype=kv_dtype, device=CPU,
        mover=KernelMover(link, CPU),
    )  # fmt: skip
    sampler = Sampler(model.shape.eos_token_ids, (), KernelChooser(link, VOCAB, CPU))
    return ModelRunner(model, cache, sampler, block_size=BLOCK_SIZE, device=CPU, link=link)


def some_plan(number: int, generator: random.Random) -> StepPlan:
    """A step of anything: prompts and their chunks, decodes, forks, drafts' lengths, copies and swaps."""
    num_rows = generator.choice([1, 1, 2, 3, 15, 16, 17, 64, 256, 257])
    rows, admitted = [], []
    for index in range(num_rows):
        seq_id = 1000 * number + 2 * index + 1
        most = max(1, min(60, MAX_TOKENS // num_rows))
        length, start = generator.choice([1, 1, generator.randint(1, most)]), generator.choice([0, 1, 16, 255])
        num_blocks = -(-(start + length) // BLOCK_SIZE)
        table = tuple(generator.randrange(NUM_BLOCKS) for _ in range(num_blocks))
        samples = tuple(Sample(seq_id + place, generator.randrange(1 << 64)) for place in range(generator.choice([0, 1, 1, 2])))
        rows.append(ScheduledSequence(seq_id, (5,) * length, start, table, samples))
        admitted.append(Admitted(seq_id, (5,) * (start + length), generator.choice(PARAMS), seed=index))
    copies = tuple(BlockCopy(index, index + 4) for index in range(generator.choice([0, 1, 3])))
    return StepPlan(number, copies, copies, copies, tuple(admitted), tuple(rows))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_nothing_is_compiled_after_the_start(kv_dtype):
    generator = random.Random(0)
    with launches_compiled(TARGETS["sm_90"]) as launches:
        runner = make_runner(kv_dtype)
        num_kinds = compile_kernels(
            runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_swap_blocks=4, max_num_seqs=MAX_SEQS, max_num_tokens=MAX_TOKENS
        )
        num_before = len(launches)
        assert num_kinds == num_before > 8
        counter = CompilationCounter()
        for number in range(1, 40):
            runner.execute(some_plan(number, generator))
        served = launches[num_before:]
        assert counter.num_compiled == 0, {launch.name for launch in served if launch.fresh}
    assert {launch.name for launch in served} == {launch.name for launch in launches[:num_before]}
    assert len(served) > 300


def test_a_pool_beyond_32_bits_is_compiled_for_as_such():
    """Triton makes other kernels of AMD's for pointers into storage of more than 2 GiB, as every pool of a real GPU is."""

    def write(pages: torch.Tensor) -> None:
        heads = torch.zeros(2, 1, SIZE, dtype=torch.bfloat16)
        reshape_and_cache(heads, heads, heads, pages, pages, torch.arange(2))

    pool = torch.empty(3 << 29, dtype=torch.bfloat16)  # the system backs none of it with memory
    far = pool[: 2 * BLOCK_SIZE * SIZE].view(2, 1, BLOCK_SIZE, SIZE)
    with launches_compiled(TARGETS["gfx942"]) as launches:
        with launches_noted() as noted:
            write(far)
        assert compile_noted(noted, 1, lambda: None) == 1
        write(far)
        write(torch.empty_like(far))
    assert [launch.fresh for launch in launches] == [True, False, True]


def test_sources_are_parsed_one_at_a_time(tmp_path, monkeypatch):
    """Python 3.11 has been seen to fail where two threads were at it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    parse, turn, most = ast.parse, threading.Semaphore(1), []

    def parse_slowly(*args: Any, **options: Any) -> ast.Module:
        most.append(turn.acquire(blocking=False))
        threading.Event().wait(0.01)
        if most[-1]:
            turn.release()
        return parse(*args, **options)

    with launches_noted() as noted:
        for case in elementwise_cases(2, "cpu"):
            case.run()
    monkeypatch.setattr(ast, "parse", parse_slowly)
    with launches_compiled(TARGETS["sm_90"]):
        assert compile_noted(noted, 3, lambda: None) == 3
    assert len(most) > 3
    assert all(most)


def test_kernels_are_loaded_where_they_are_compiled(monkeypatch):
    """Some versions of Triton build a launcher with the system's compiler when a kernel is first launched: in a request's time."""
    built, loaded = [], []

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 20}

        def load_binary(self, name: str, *others: Any) -> tuple[object, int, int, int, int]:
            loaded.append(name)
            return object(), 1, 32, 0, 1024

    def build(source: Any, metadata: Any) -> Callable[..., None]:
        built.append(threading.current_thread().name)
        return lambda *args: None

    with launches_noted() as noted:
        for case in elementwise_cases(2, "cpu"):
            case.run()
    monkeypatch.setattr(CompileOnlyDriver, "launcher_cls", staticmethod(build), raising=False)
    monkeypatch.setattr(CompileOnlyDriver, "utils", Utils(), raising=False)
    with launches_compiled(TARGETS["sm_90"]):
        assert compile_noted(noted, 2, lambda: None) == 3
    assert sorted(loaded) == ["_reshape_and_cache_kernel", "_rms_norm_kernel", "_swiglu_kernel"]
    assert len(built) == 3
    assert all(name.startswith("pagestream-compile") for name in built)


def test_the_counter_tells_of_what_was_forgotten(caplog):
    with launches_compiled(TARGETS["sm_90"]):
        counter = CompilationCounter()
        make_runner(torch.bfloat16).execute(StepPlan(0, copies=(BlockCopy(0, 1),)))
    assert counter.num_compiled == 1
    assert "_copy_blocks_kernel" in caplog.text


def test_noting_launches_nothing():
    with launches_compiled(TARGETS["sm_90"]) as launches:
        with launches_noted() as noted:
            make_runner(torch.bfloat16).execute(StepPlan(0, copies=(BlockCopy(0, 1),)))
        assert [launch.kernel.fn.__name__ for launch in noted] == ["_copy_blocks_kernel"]
        assert launches == []


def test_listeners_hear_of_each_late_compilation_once():
    told: list[str] = []

    class Listener:
        def step_done(self, stats: StepStats) -> None:
            told.append("step")

        def kernel_compiled(self) -> None:
            told.append("kernel")

    counts = iter([0, 2, 2])
    watch = RequestWatch(Listener(), lambda: 0.0, count_compiled=lambda: next(counts))  # type: ignore[arg-type]
    stats = StepStats(num_running=0, num_waiting=0, num_swapped=0, num_used_blocks=0, num_blocks=1, num_scheduled_tokens=0)
    for _ in range(3):
        watch.step_done([], stats)
    assert told == ["step", "step", "kernel", "kernel", "step"]
