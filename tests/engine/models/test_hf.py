"""Models of transformers over our pages against the same models alone, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagestream.engine.attention.base import AttentionBackend
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.config import EngineConfig, ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.model_choice import Kernels, ModelChoice
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.hf import TransformersLM, load_transformers
from pagestream.engine.models.hf_attention import window_of
from pagestream.engine.models.linear import LinearMakers
from tests.engine.models.oracle import CPU, assert_equals_reference, assert_rows_are_independent
from tests.engine.models.teacher import alone, random_prompts
from tests.tiny_models import DECODER, VOCAB_SIZE, make_checkpoint

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {  # its window is in its mask alone
        **DECODER,
        **MIXTURE,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "shared_expert_intermediate_size": 32,
    },
    "gpt_oss": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 16},
    "granite": {**DECODER, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "llama4_text": {  # its experts' weights are one tensor, and all of them read all tokens
        **DECODER,
        "attention_chunk_size": 512,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "head_dim": 16,
    },
    "nemotron": DECODER,  # hands no extra arguments to its attention
    "gpt2": {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.3},
}


def hf_model(folder: Path, dtype: str = "float32", **options: Any) -> TransformersLM:
    config = ModelConfig(model=str(folder), dtype=dtype)
    checkpoint = open_checkpoint(config)
    return load_transformers(checkpoint, config, device=CPU, dtype=checkpoint.dtype, attention=TorchAttention(), **options)


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "opt"])
def test_transformers_over_pages_equals_transformers(checkpoints: dict[str, Path], arch: str) -> None:
    assert_equals_reference(hf_model(checkpoints[arch]), checkpoints[arch])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["gemma2", "opt"])
def test_transformers_rows_do_not_depend_on_company(checkpoints: dict[str, Path], arch: str, dtype: str) -> None:
    assert_rows_are_independent(hf_model(checkpoints[arch], dtype))


@pytest.mark.parametrize("arch", MORE_CONFIGS)
def test_other_architectures_equal_transformers_and_have_independent_rows(tmp_path: Path, arch: str) -> None:
    folder = make_checkpoint(arch, tmp_path, **MORE_CONFIGS[arch])
    model = hf_model(folder)
    assert_equals_reference(model, folder)
    assert_rows_are_independent(model)


def test_windows_are_found_where_only_the_mask_has_them(tmp_path: Path) -> None:
    config = MORE_CONFIGS["qwen2_moe"] | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    model = hf_model(make_checkpoint("qwen2_moe", tmp_path, **config))
    assert model.windows == (None, 20, None)


REFUSED = {
    "bloom": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "no replaceable attention"),
    "doge": (DECODER, "masks of its own"),
    "llama4_text": (
        {**DECODER, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
        "neither causal nor a sliding window",
    ),
    "deepseek_v3": (
        {
            **DECODER,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 3,
        },
        "another size",
    ),
    "granitemoehybrid": (
        {
            **DECODER,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        "can be paged",
    ),
}


@pytest.mark.parametrize("arch", REFUSED)
def test_models_that_pages_cannot_serve_are_refused_with_the_reason(tmp_path: Path, arch: str) -> None:
    changes, reason = REFUSED[arch]
    folder = make_checkpoint(arch, tmp_path, **changes)
    with pytest.raises(StartError, match=reason) as refused:
        hf_model(folder)
    assert "\n" not in str(refused.value)


def spoil(weights: dict[str, Tensor], what: str) -> None:
    name = "model.decoder.layers.1.fc1.weight"
    match what:
        case "missing":
            del weights[name]
        case "shape":
            weights[name] = weights[name][:3].contiguous()
        case "codes":
            weights[name] = weights[name].to(torch.int8)
        case "8 bits":
            weights[name] = weights[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("missing", "has no tensor model.decoder.layers.1.fc1.weight"),
        ("shape", r"fc1.weight is \[3, 64\] in .*copy, and its config asks for \[96, 64\]"),
        ("codes", "fc1.weight as I8: quantised checkpoints are not supported"),
        ("8 bits", "fc1.weight as F8_E4M3: quantised"),
    ],
)
def test_damaged_weights_are_refused_by_file_and_tensor(checkpoints: dict[str, Path], tmp_path: Path, what: str, reason: str) -> None:
    folder = Path(shutil.copytree(checkpoints["opt"], tmp_path / "copy"))
    weights = load_file(folder / "model.safetensors")
    spoil(weights, what)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match=reason) as refused:
        hf_model(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1.5}, {"dtype": []}, {"enable_bias": "x"}, {"num_attention_heads": 0}])
def test_a_config_that_transformers_can_not_read_is_refused_in_one_line(checkpoints: dict[str, Path], tmp_path: Path, changes: Any) -> None:
    folder = Path(shutil.copytree(checkpoints["opt"], tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(StartError, match="OPTForCausalLM") as refused:
        hf_model(folder)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_cut_off_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["opt"], tmp_path / "copy"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartError, match="model.safetensors is not a usable safetensors file"):
        hf_model(folder)


def test_a_mask_that_no_layer_uses_refuses_nothing(tmp_path: Path) -> None:
    # Its class makes a mask for layers with a window too, of which this one has none: that mask shows nothing at all.
    config = MORE_CONFIGS["qwen2_moe"] | {"use_sliding_window": False}
    folder = make_checkpoint("qwen2_moe", tmp_path, **config)
    model = hf_model(folder)
    assert model.windows == (None, None, None)
    assert_equals_reference(model, folder)


def test_attention_is_made_for_the_length_that_the_model_has_by_whatever_name(tmp_path: Path) -> None:
    asked: list[int] = []

    class Choice(ModelChoice):
        def _attention(self, max_model_len: int, *, takes_pages: bool) -> AttentionBackend:
            asked.append(max_model_len)
            return super()._attention(max_model_len, takes_pages=takes_pages)

    folder = make_checkpoint("gpt2", tmp_path, **MORE_CONFIGS["gpt2"] | {"n_positions": 4096})
    config = EngineConfig(model=ModelConfig(model=str(folder)))
    model = Choice(config, CPU, Kernels.TORCH).load(open_checkpoint(config.model))
    assert asked == [4096]
    assert model.shape.max_model_len == 4096


def test_dummy_weights_of_a_transformers_model(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints["opt"] / "config.json").read_bytes())
    config = ModelConfig(model=str(tmp_path), load_format="dummy", seed=5)
    checkpoint = open_checkpoint(config)
    models = [
        load_transformers(checkpoint, config, device=CPU, dtype=checkpoint.dtype, attention=TorchAttention()) for _ in range(2)
    ]
    prompt = random_prompts([9], VOCAB_SIZE)[0]
    assert torch.equal(alone(models[0], prompt), alone(models[1], prompt))


def test_given_linears_are_used_for_every_linear_of_a_transformers_model(checkpoints: dict[str, Path]) -> None:
    made: list[tuple[int, ...]] = []

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        made.append(tuple(weight.shape))
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    model = hf_model(checkpoints["opt"], linears=LinearMakers(make_linear, make_linear))
    assert sorted(made) == sorted([(64, 64)] * 8 + [(96, 64), (64, 96)] * 2 + [(VOCAB_SIZE, 64)])
    assert_equals_reference(model, checkpoints["opt"])


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


@pytest.mark.parametrize("window", [1, 2, 16, 99])
def test_a_window_is_read_off_a_mask(window: int) -> None:
    assert window_of(lambda b, h, q, k: causal(b, h, q, k) & (k > q - window), 100) == window


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal, 100) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: causal(b, h, q, k) & (k // 16 == q // 16),  # chunks
        lambda b, h, q, k: causal(b, h, q, k) | (k < 10),  # a prefix that sees itself
        lambda b, h, q, k: (q - k).abs() < 8,  # both ways
        lambda b, h, q, k: (causal(b, h, q, k) & (k > q - 16)) | (k < 4) & causal(b, h, q, k),  # the first keys stay visible
    ],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(StartError, match="neither causal nor a sliding window"):
        window_of(mask, 100)
