"""The engine in this process: decode steps beside the machine's floor, and many prompts at once."""

from __future__ import annotations

import time
from typing import Any

from pagestream.engine import LLM, EngineArgs, SamplingParams, time_decode_steps
from pagestream.server.bench.workloads import make_asks


def step_rows(args: EngineArgs, batch_sizes: list[int], num_prompt_tokens: int, num_output_tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "sequences": timing.num_sequences,
            "step ms": timing.step_s * 1e3,
            "floor ms": timing.floor_s * 1e3,
            "% of floor": 100 * timing.floor_s / timing.step_s,
            "tok/s": timing.num_sequences / timing.step_s,
            "read GB/s": timing.rates.read_bytes_per_s / 1e9,
            "GFLOP/s": timing.rates.flops_per_s / 1e9,
        }
        for timing in time_decode_steps(args, batch_sizes, num_prompt_tokens, num_output_tokens)
    ]


def throughput_row(options: dict[str, Any], workload: str, num_prompts: int) -> dict[str, Any]:
    llm = LLM(**options)
    asks = make_asks(workload, num_prompts, seed=1)
    params = SamplingParams(temperature=0, max_tokens=asks[0].max_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = llm.generate([ask.prompt for ask in asks], params)
    wall_s = time.perf_counter() - started_s
    return {
        "prompts": num_prompts,
        "seconds": wall_s,
        "prompts/s": num_prompts / wall_s,
        "prompt tok/s": sum(output.usage.num_prompt_tokens for output in outputs) / wall_s,
        "output tok/s": sum(output.usage.num_output_tokens for output in outputs) / wall_s,
    }
