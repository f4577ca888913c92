"""The GGUF reader: its numbers against the gguf package, its models against transformers, and files that lie."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.decoder import TorchDecoder
from pagestream.engine.models.gguf_blocks import GgmlType
from pagestream.engine.models.gguf_file import GgufFile
from pagestream.engine.models.loader import load_decoder
from pagestream.engine.models.tensor_source import GgufSource
from tests.engine.models.oracle import CPU, assert_equals_reference
from tests.tiny_models import make_checkpoint


def write_gguf(path: Path, arch: str, values: dict[str, Any], tensors: dict[str, np.ndarray], types: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, array in tensors.items():
        kind = types.get(name)
        writer.add_tensor(name, array if kind is None else quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as files of the architecture llama have them: 0, D/2, 1, D/2 + 1, … of each head."""
    head_size = len(weight) // num_heads
    order = [head * head_size + i % 2 * head_size // 2 + i // 2 for head in range(num_heads) for i in range(head_size)]
    return weight[order]


def as_gguf(folder: Path, path: Path) -> Path:
    """A checkpoint of Hugging Face as a GGUF file in float32."""
    from safetensors.numpy import load_file

    from pagestream.engine.models.tensor_source import gguf_name, read_json

    config = read_json(folder / "config.json")
    arch = config["model_type"]
    rope = config["rope_parameters"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": [config["num_key_value_heads"]] * config["num_hidden_layers"],
        f"{arch}.attention.key_length": head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        stored = gguf_name(name)
        kind = stored.split(".", 2)[-1]
        tensors[stored] = interleaved(array, heads[kind]) if arch == "llama" and kind in heads else array
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_size, 2) / head_size)
        tensors["rope_freqs.weight"] = (plain / llama3_frequencies(plain, rope)).astype(np.float32)
    if rope["rope_type"] == "longrope":
        values[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values[f"{arch}.rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(512 / 128) / np.log(128)))
        tensors["rope_factors_long.weight"] = np.array(rope["long_factor"], dtype=np.float32)
        tensors["rope_factors_short.weight"] = np.array(rope["short_factor"], dtype=np.float32)
    return write_gguf(path, arch, values, tensors, {})


def llama3_frequencies(plain: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """One frequency at a time, in words of the wavelength."""
    out = []
    for frequency in plain:
        turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
        keep = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        keep = min(1.0, max(0.0, keep))
        out.append(keep * frequency + (1 - keep) * frequency / rope["factor"])
    return np.array(out)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_gguf_model_equals_transformers(checkpoints: dict[str, Path], tmp_path: Path, arch: str) -> None:
    folder = make_checkpoint("qwen2", tmp_path / "full", use_sliding_window=False) if arch == "qwen2" else checkpoints[arch]
    path = as_gguf(folder, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(ModelConfig(model=str(path), dtype="float32"))
    loaded = load_decoder(checkpoint, device=CPU, dtype=checkpoint.dtype)
    assert loaded.shape.eos_token_ids == {2, 7}
    assert_equals_reference(TorchDecoder(loaded.spec, loaded.weights, loaded.shape, TorchAttention()), folder)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16", "F32"])
def test_weights_unpack_to_the_bits_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    type_ = GGMLQuantizationType[kind]
    array = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    packed = quants.quantize(array, type_)
    file = GgufFile(write_gguf(tmp_path / "x.gguf", "llama", {}, {"w": array}, {"w": type_}))
    raw = file.raw("w")
    assert raw.type == GgmlType[kind]
    np.testing.assert_array_equal(raw.data.numpy().reshape(-1), packed.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(file.load("w").float().numpy(), quants.dequantize(packed, type_).astype(np.float32))


def test_the_default_model_unpacks_to_the_bits_of_the_gguf_package(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        raw = file.raw(name)
        expected = quants.dequantize(raw.data[:1000].numpy(), GGMLQuantizationType(raw.type))
        np.testing.assert_array_equal(file.load(name).view(len(raw.data), -1)[:1000].numpy(), expected)


def test_the_default_model_is_what_it_is_known_to_be(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(smollm2_path)))
    loaded = load_decoder(checkpoint, device=CPU, dtype=checkpoint.dtype)
    assert checkpoint.dtype == torch.bfloat16
    assert loaded.shape.eos_token_ids == {2}
    assert (loaded.shape.num_layers, loaded.shape.num_kv_heads, loaded.shape.head_size) == (30, 3, 64)
    assert (loaded.shape.max_model_len, loaded.shape.vocab_size, loaded.shape.num_parameters) == (8192, 49152, 134_515_008)
    assert loaded.weights.head is loaded.weights.embedding


def test_stored_rows_of_q_and_k_are_told_apart_from_the_others(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = GgufFile(as_gguf(checkpoints["llama"], tmp_path / "model.gguf"))
    source = GgufSource(file, {"num_attention_heads": 4, "num_key_value_heads": 2})
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = source.rows(name)
    assert rows is not None
    assert torch.equal(source.load(name, (64, 64)), file.load("blk.0.attn_q.weight")[rows])
    assert source.rows("model.layers.0.self_attn.v_proj.weight") is None


def small_file(path: Path) -> Path:
    values = {"llama.block_count": 1, "a.string": "text", "an.array": ["x", "yy", ""], "numbers": [1, 2, 3], "f": 0.5}
    return write_gguf(path, "llama", values, {"w": np.ones((2, 32), dtype=np.float32)}, {})


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    file = GgufFile(small_file(tmp_path / "x.gguf"))
    assert file.get("a.string") == "text"
    assert file.get("an.array") == ["x", "yy", ""]
    assert file.get("numbers") == [1, 2, 3]
    assert file.get("f") == 0.5
    assert file.get("absent", 7) == 7


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    content = small_file(tmp_path / "x.gguf").read_bytes()
    data_end = len(content) - 1
    for length in range(data_end):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:length])
        with pytest.raises(StartError, match="cut.gguf"):
            GgufFile(path)


def test_any_changed_byte_gives_a_file_or_a_start_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    content = as_gguf(checkpoints["qwen3"], tmp_path / "x.gguf").read_bytes()
    header_end = GgufFile(tmp_path / "x.gguf").tensors["output_norm.weight"].start
    generator = random.Random(0)
    path = tmp_path / "changed.gguf"
    refusals = []
    for _ in range(150):
        changed = bytearray(content)
        changed[generator.randrange(min(header_end, 4000))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            open_checkpoint(ModelConfig(model=str(path)))
        except StartError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert not any("\n" in message for message in refusals)


HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("tensors", lambda content: content[:8] + HUGE + content[16:]),
        ("keys", lambda content: content[:16] + HUGE + content[24:]),
        ("length of a key", lambda content: content[:24] + HUGE + content[32:]),
        ("dimension", lambda content: content.replace(struct.pack("<QQ", 32, 2), struct.pack("<Q", 32) + HUGE)),
        ("array", lambda content: content.replace(struct.pack("<IQ", 8, 3), struct.pack("<I", 8) + HUGE)),
        ("offset", lambda content: content.replace(struct.pack("<QQIQ", 32, 2, 0, 0), struct.pack("<QQI", 32, 2, 0) + HUGE)),
    ],
)
def test_huge_numbers_are_refused_without_allocating(tmp_path: Path, what: str, change: Callable[[bytes], bytes]) -> None:
    content = small_file(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "huge.gguf"
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    tracemalloc.start()
    try:
        with pytest.raises(StartError, match="not a usable GGUF file"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_architecture_that_is_not_computed_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "gemma3", {}, {"w": np.ones((2, 32), dtype=np.float32)}, {})
    with pytest.raises(StartError, match="'gemma3'"):
        open_checkpoint(ModelConfig(model=str(path)))
