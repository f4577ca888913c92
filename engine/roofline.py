"""What this machine could do at most, and how near to it a decode step comes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.engine_args import EngineArgs
from pagestream.engine.factory import BuiltEngine, build_engine

READ_BYTES = 1 << 28  # well beyond any cache
MATRIX_SIZE = 1536
NUM_TRIES = 5


@dataclass(frozen=True, slots=True)
class Rates:
    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Median decode step of so many sequences, each getting one token."""

    num_sequences: int
    step_s: float
    floor_s: float  # the least that reading, or else computing, takes
    rates: Rates


def measure_rates(dtype: torch.dtype, device: torch.device | None = None) -> Rates:
    """The best of some tries, by plain torch: a sum over memory, and a product of square matrices."""
    device = device or torch.device("cpu")
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    a = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    read_s = min(seconds_of(lambda: memory.sum(), device) for _ in range(NUM_TRIES))
    multiply_s = min(seconds_of(lambda: a @ a, device) for _ in range(NUM_TRIES))
    return Rates(read_bytes_per_s=READ_BYTES / read_s, flops_per_s=2 * MATRIX_SIZE**3 / multiply_s)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def step_floor_s(built: BuiltEngine, rates: Rates, num_sequences: int, num_context_tokens: int) -> float:
    """The larger of two times: all weights and each sequence's K and V read once; every parameter multiplied once a sequence."""
    num_bytes = built.shape.weight_bytes + num_sequences * num_context_tokens * built.kv_bytes_per_token
    flops = 2 * built.shape.num_parameters * num_sequences
    return max(num_bytes / rates.read_bytes_per_s, flops / rates.flops_per_s)


def time_decode_steps(
    args: EngineArgs, batch_sizes: Sequence[int], num_prompt_tokens: int, num_output_tokens: int
) -> list[StepTiming]:
    """Load the model and time its steps, scheduling, sampling and detokenizing included.  Raises StartError."""
    built = build_engine(args.to_config())
    engine = built.engine
    rates = measure_rates(built.dtype)
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    timings = []
    for batch_size in batch_sizes:
        for number in range(batch_size):
            # Each with a first token of its own, so that no prefix is shared.
            engine.add_request(f"{batch_size}-{number}", [number % built.shape.vocab_size] + [1] * (num_prompt_tokens - 1), params)
        times = []
        while engine.has_unfinished_requests():
            started_s = time.perf_counter()
            outputs = engine.step()
            if sum(len(answer.token_ids) for output in outputs for answer in output.outputs) == batch_size:
                times.append(time.perf_counter() - started_s)
        step_s = statistics.median(times[1:] or times)
        floor_s = step_floor_s(built, rates, batch_size, num_prompt_tokens + num_output_tokens // 2)
        timings.append(StepTiming(batch_size, step_s, floor_s, rates))
    return timings
