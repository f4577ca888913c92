"""Opening checkpoints and loading the Llama-shaped family."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.loader import LoadedDecoder, load_decoder
from pagestream.engine.models.tensor_source import DummySource
from tests.engine.models.oracle import CPU


def load(folder: Path, **options: Any) -> LoadedDecoder:
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), **options))
    return load_decoder(checkpoint, device=CPU, dtype=checkpoint.dtype)


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "copy"))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sharded_checkpoint_is_the_same_as_a_whole_one(copy: Path) -> None:
    whole = load(copy)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(copy)
    assert torch.equal(sharded.weights.layers[2].gate_up, whole.weights.layers[2].gate_up)
    assert sharded.shape == whole.shape

    (copy / "model-2.safetensors").unlink()
    with pytest.raises(StartError, match="model-2.safetensors"):
        load(copy)


def test_an_index_may_not_leave_its_folder(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartError, match="not a file of that folder"):
        load(copy)


def test_what_was_loaded_is_no_view_of_the_file(copy: Path) -> None:
    weights = load(copy).weights
    before = weights.final_norm.clone()
    weights.final_norm.add_(1.0)
    assert torch.equal(load(copy).weights.final_norm, before)


def test_dtype_auto_is_the_checkpoints_own(copy: Path) -> None:
    assert open_checkpoint(ModelConfig(model=str(copy))).dtype == torch.float32
    change_json(copy / "config.json", dtype="float16")
    assert open_checkpoint(ModelConfig(model=str(copy))).dtype == torch.float16
    assert open_checkpoint(ModelConfig(model=str(copy), dtype="bfloat16")).dtype == torch.bfloat16
    config = json.loads((copy / "config.json").read_text())
    del config["dtype"]
    (copy / "config.json").write_text(json.dumps(config))
    save_file({k: v.bfloat16() for k, v in load_file(copy / "model.safetensors").items()}, copy / "model.safetensors")
    assert open_checkpoint(ModelConfig(model=str(copy))).dtype == torch.bfloat16


def test_the_ends_of_a_text_come_from_the_generation_config(copy: Path) -> None:
    change_json(copy / "generation_config.json", eos_token_id=[2, 9])
    assert load(copy).shape.eos_token_ids == {2, 9}
    (copy / "generation_config.json").unlink()
    assert load(copy).shape.eos_token_ids == {2}


def test_a_head_of_its_own_is_believed_more_than_a_config_that_ties_it(copy: Path) -> None:
    change_json(copy / "config.json", tie_word_embeddings=True)
    assert load(copy).weights.head is not load(copy).weights.embedding
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors")
    loaded = load(copy)
    assert loaded.weights.head is loaded.weights.embedding


HEADERS = {
    "longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "cut off": struct.pack("<Q", 1000) + b'{"a":',
    "empty": b"",
    "no JSON": struct.pack("<Q", 8) + b"nonsense",
    "tensor behind the end": (lambda header: struct.pack("<Q", len(header)) + header)(
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    ),
    "shape that does not fit its bytes": (lambda header: struct.pack("<Q", len(header)) + header + bytes(16))(
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 16]}}).encode()
    ),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_safetensors_file_that_lies_is_refused_without_allocating(copy: Path, what: str) -> None:
    (copy / "model.safetensors").write_bytes(HEADERS[what])
    tracemalloc.start()
    try:
        with pytest.raises(StartError, match="not a usable safetensors file") as error:
            load(copy)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 128}, "embed_tokens.weight is .*/copy, and its config asks for"),
        ({"intermediate_size": 1 << 30}, "gate_proj.weight is .* and its config asks for"),
        ({"num_hidden_layers": 4}, "no tensor model.layers.3"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers as a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' has unusable parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'linear' has unusable parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.nan}}, "'linear' has unusable parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 8}}, "factor as a positive number"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "is not supported"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta as a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor as a positive number"),
        ({"rope_parameters": "x"}, "rope_parameters as a table"),
        ({"rms_norm_eps": None}, "rms_norm_eps as a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps as a number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps as a number"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 1.5}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}, None),
    ],
)
def test_a_config_that_can_not_be_served_is_refused(copy: Path, changes: dict[str, Any], reason: str | None) -> None:
    change_json(copy / "config.json", **changes)
    (copy / "generation_config.json").unlink()
    if reason is None:
        assert not open_checkpoint(ModelConfig(model=str(copy))).is_decoder
        return
    with pytest.raises(StartError, match=reason) as error:
        load(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": -1}, "sliding_window as a whole number"),
        ({"sliding_window": 1.5}, "sliding_window as a whole number"),
        ({"layer_types": "sliding_attention"}, "layer_types as a list of 3"),
        ({"layer_types": [1, "full_attention", "chunked_attention"]}, "layer_types that are not supported: 1, chunked_attention"),
    ],
)
def test_windows_that_are_none_are_refused(checkpoints: dict[str, Path], tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = Path(shutil.copytree(checkpoints["qwen2"], tmp_path / "copy"))
    change_json(folder / "config.json", **changes)
    with pytest.raises(StartError, match=reason):
        load(folder)


def test_an_end_outside_the_vocabulary_is_none(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_json(copy / "generation_config.json", eos_token_id=[2, 320, -1])
    assert load(copy).shape.eos_token_ids == {2}
    assert "eos_token_id [-1, 320] is outside the vocabulary of 320 tokens" in caplog.text


def test_options_that_can_not_be_honoured_are_refused(copy: Path) -> None:
    with pytest.raises(StartError, match="quantization must be one of auto, none, int8, int4, not 'awq'"):
        load(copy, quantization="awq")
    with pytest.raises(StartError, match="max_model_len 513 is more than the 512 positions"):
        load(copy, max_model_len=513)


def test_dummy_weights_come_from_the_config_alone_and_from_the_seed(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    shutil.copy(checkpoints["qwen2"] / "config.json", tmp_path)
    change_json(tmp_path / "config.json", initializer_range=0.35)

    def weights(seed: int) -> torch.Tensor:
        return load(tmp_path, load_format="dummy", seed=seed).weights.layers[1].qkv

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert 0.3 < float(weights(1).std()) < 0.4


def test_dummy_weights_are_made_on_the_device(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path), load_format="dummy"))
    weights = load_decoder(checkpoint, device=torch.device("meta"), dtype=torch.bfloat16).weights
    assert isinstance(checkpoint.source, DummySource)
    shape = (checkpoint.config["vocab_size"], checkpoint.config["hidden_size"])
    made = checkpoint.source.load("model.embed_tokens.weight", shape)
    assert made.device == weights.layers[0].down.device == torch.device("meta")


def test_a_model_of_the_family_loads_without_transformers(smollm2_path: Path) -> None:
    code = f"""
import sys, torch
from pagestream.engine.core.config import ModelConfig
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.loader import load_decoder
checkpoint = open_checkpoint(ModelConfig(model={str(smollm2_path)!r}))
load_decoder(checkpoint, device=torch.device("cpu"), dtype=checkpoint.dtype)
print(sorted(set(sys.modules) & {{"transformers", "gguf", "huggingface_hub"}}))
"""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=one_thread)
    assert run.stdout.strip() == "[]"
