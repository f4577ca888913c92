"""Llama-3.1-8B's shape with dummy weights through LLM.generate at several batch sizes: tokens per second beside the floor.

python tests/gpu/end_to_end.py [--json FILE] [--kernels FILE] [--dry]
    --kernels: figures of kernels.bench, to be written into the same file;  --dry: sizes for the interpreter on a CPU
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from pagestream.engine import LLM, SamplingParams
from pagestream.engine.roofline import measure_rates
from tests.tiny_models import EOS_TOKEN_ID, make_tokenizer

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 320, "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    batch_size: int
    num_prompt_tokens: int
    num_output_tokens: int


LOADS = [Load(1, 1024, 128), Load(16, 1024, 128), Load(64, 1024, 128), Load(64, 2048, 64), Load(256, 1024, 64)]
DRY_LOADS = [Load(1, 6, 2), Load(2, 20, 3)]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load: decode is what all tokens but the first of each answer took."""

    batch_size: int
    num_prompt_tokens: int
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    decode_step_s: float
    floor_step_s: float
    share_of_floor: float


def measure(llm: LLM, load: Load, read_bytes_per_s: float, weight_bytes: int, kv_bytes_per_token: int) -> Figures:
    """Generate one token and then several, from prompts that nobody has seen; the difference is the decode steps."""
    seconds = []
    for run, num_tokens in enumerate((1, load.num_output_tokens)):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [[3 + (number + run) % 300] + [5] * (load.num_prompt_tokens - 1) for number in range(load.batch_size)]
        started_s = time.perf_counter()
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        seconds.append(time.perf_counter() - started_s)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    step_s = max(seconds[1] - seconds[0], 1e-9) / (load.num_output_tokens - 1)
    context = load.num_prompt_tokens + load.num_output_tokens / 2
    floor_s = (weight_bytes + load.batch_size * context * kv_bytes_per_token) / read_bytes_per_s
    return Figures(
        load.batch_size, load.num_prompt_tokens, load.batch_size * load.num_prompt_tokens / seconds[0], load.batch_size / step_s,
        step_s, floor_s, floor_s / step_s,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    config, loads = (TINY, DRY_LOADS) if args.dry else (LLAMA_8B, LOADS)
    options: dict[str, Any] = {"enable_prefix_caching": False, "load_format": "dummy", "max_model_len": 4096, "seed": 0}
    if args.dry:
        options |= {
            "device": "cpu", "kernels": "triton", "num_kv_blocks": 16, "max_num_batched_tokens": 24, "max_num_seqs": 2,
            "max_model_len": 64,
        }  # fmt: skip
    device = torch.device("cpu" if args.dry else "cuda")
    rates = measure_rates(torch.float32 if args.dry else torch.bfloat16, device)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        make_tokenizer(Path(folder))
        started_s = time.perf_counter()
        llm = LLM(folder, **options)
    start_s = time.perf_counter() - started_s
    kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * (config["hidden_size"] // config["num_attention_heads"])
    kv_bytes *= 4 if args.dry else 2
    # Of an embedding's rows a step reads as many as it has tokens: all but its bytes are read.
    layers = config["hidden_size"] ** 2 * (2 + 2 * config["num_key_value_heads"] / config["num_attention_heads"])
    layers += 3 * config["hidden_size"] * config["intermediate_size"]
    num_read = config["num_hidden_layers"] * layers + config["vocab_size"] * config["hidden_size"]
    rows = []
    print(f"{'batch':>5}{'prompt':>8}{'prompt tok/s':>14}{'decode tok/s':>14}{'step ms':>10}{'floor ms':>10}{'of floor':>10}")
    for load in loads:
        row = measure(llm, load, rates.read_bytes_per_s, int(num_read * (4 if args.dry else 2)), kv_bytes)
        rows.append(row)
        print(
            f"{row.batch_size:5}{row.num_prompt_tokens:8}{row.prompt_tokens_per_s:14.0f}{row.decode_tokens_per_s:14.1f}"
            f"{row.decode_step_s * 1e3:10.2f}{row.floor_step_s * 1e3:10.2f}{row.share_of_floor:10.1%}",
            flush=True,
        )
    num_compiled = llm.llm_engine.count_compiled()
    print(f"start {start_s:.1f} s; kernels compiled after it: {num_compiled}")
    if args.json is not None:
        figures: dict[str, Any] = {
            "device": "cpu" if args.dry else torch.cuda.get_device_name(), "torch": torch.__version__, "start_s": start_s,
            "compiled_after_start": num_compiled, "rates": asdict(rates), "generate": [asdict(row) for row in rows],
        }  # fmt: skip
        if args.kernels is not None and args.kernels.is_file():
            figures["kernels"] = json.loads(args.kernels.read_text())
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
