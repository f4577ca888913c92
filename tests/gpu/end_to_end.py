"""Llama-3.1-8B's shape with dummy weights through the engine at several batch sizes: tokens per second beside the floor.

python tests/gpu/end_to_end.py [--json FILE] [--dry]        --dry: sizes for the interpreter on a CPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

from pagestream.engine import LLM, SamplingParams
from pagestream.engine.roofline import measure_rates
from pagestream.kernels.gpu_timing import measured_rates
from tests.interpreter import accept_tensors_as_bounds
from tests.tiny_models import EOS_TOKEN_ID, make_tokenizer

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 1000, "max_position_embeddings": 512, "torch_dtype": "float32",  # the tokenizer knows fewer, as above
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    batch_size: int
    num_prompt_tokens: int
    num_output_tokens: int


# Output tokens: the first prompts already get some while the last ones are computed, and then enough steps must be left.
LOADS = [Load(1, 1024, 96), Load(16, 1024, 64), Load(64, 1024, 64), Load(64, 2048, 64), Load(256, 1024, 80)]
DRY_LOADS = [Load(1, 6, 3), Load(2, 20, 5)]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load: prompts until each has its first token, and the median of the steps that gave every sequence one."""

    batch_size: int
    num_prompt_tokens: int
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    decode_step_s: float
    num_decode_steps: int
    floor_step_s: float
    share_of_floor: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes that a decode step must read."""

    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, config: dict[str, Any], element_bytes: int) -> StepCost:
        kv_size = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
        hidden_size = config["hidden_size"]
        layer = 2 * hidden_size * (hidden_size + kv_size) + 3 * hidden_size * config["intermediate_size"]
        # Of an embedding's rows a step reads as many as it has tokens; the head it reads whole.
        weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden_size
        return cls(element_bytes * weights, element_bytes * 2 * config["num_hidden_layers"] * kv_size)


def measure(llm: LLM, load: Load, read_bytes_per_s: float, cost: StepCost) -> Figures:
    """Run the load once, with the scheduling, the draw and the text of every step in its time."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=load.num_output_tokens, ignore_eos=True)
    for number in range(load.batch_size):
        engine.add_request(f"{load}-{number}", [3 + number % 300] + [5] * (load.num_prompt_tokens - 1), params)
    begun: set[str] = set()
    prompts_s, num_tokens = 0.0, load.batch_size * load.num_prompt_tokens
    steps: list[tuple[float, int]] = []  # seconds, and the tokens that were in the cache
    while engine.has_unfinished_requests():
        started_s = time.perf_counter()
        outputs = engine.step()
        step_s = time.perf_counter() - started_s
        if len(begun) < load.batch_size:
            prompts_s += step_s
            begun.update(output.request_id for output in outputs)
        elif len(outputs) == load.batch_size:
            steps.append((step_s, num_tokens))
        num_tokens += sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    assert num_tokens == load.batch_size * (load.num_prompt_tokens + load.num_output_tokens), "some answer is too short"
    step_s = statistics.median(seconds for seconds, _ in steps)
    context_bytes = statistics.mean(held for _, held in steps) * cost.kv_bytes_per_token
    floor_s = (cost.weight_bytes + context_bytes) / read_bytes_per_s
    return Figures(
        load.batch_size, load.num_prompt_tokens, load.batch_size * load.num_prompt_tokens / prompts_s, load.batch_size / step_s,
        step_s, len(steps), floor_s, floor_s / step_s,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    config, loads = (TINY, DRY_LOADS) if args.dry else (LLAMA_8B, LOADS)
    options: dict[str, Any] = {"enable_prefix_caching": False, "load_format": "dummy", "max_model_len": 4096, "seed": 0}
    if args.dry:
        accept_tensors_as_bounds()
        options |= {
            "device": "cpu", "kernels": "triton", "num_kv_blocks": 16, "max_num_batched_tokens": 24, "max_num_seqs": 2,
            "max_model_len": 64,
        }  # fmt: skip
    rates = asdict(measure_rates(torch.float32)) if args.dry else measured_rates()
    read_bytes_per_s = rates["read_bytes_per_s" if args.dry else "read"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        make_tokenizer(Path(folder))
        started_s = time.perf_counter()
        llm = LLM(folder, **options)
    start_s = time.perf_counter() - started_s
    print(f"start {start_s:.1f} s", flush=True)
    figures: dict[str, Any] = {
        "device": "cpu" if args.dry else torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "start_s": start_s, "rates": rates, "generate": [],
    }  # fmt: skip
    cost = StepCost.of(config, 4 if args.dry else 2)
    print(f"{'batch':>5}{'prompt':>8}{'prompt tok/s':>14}{'decode tok/s':>14}{'step ms':>10}{'floor ms':>10}{'of floor':>10}")
    for load in loads:
        row = measure(llm, load, read_bytes_per_s, cost)
        print(
            f"{row.batch_size:5}{row.num_prompt_tokens:8}{row.prompt_tokens_per_s:14.0f}{row.decode_tokens_per_s:14.1f}"
            f"{row.decode_step_s * 1e3:10.2f}{row.floor_step_s * 1e3:10.2f}{row.share_of_floor:10.1%}",
            flush=True,
        )
        figures["generate"].append(asdict(row))
        figures["compiled_after_start"] = llm.llm_engine.count_compiled()
        if args.json is not None:  # all there is so far: the next load may be cut short
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"kernels compiled after the start: {figures['compiled_after_start']}")


if __name__ == "__main__":
    main()
