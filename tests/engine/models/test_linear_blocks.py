"""Weights converted at load: the packed operators against the same weights unpacked, what is converted, and what never is."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagestream.engine.attention.cpu_backend import CpuAttentionBackend
from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.cpu_decoder import CpuDecoder
from pagestream.engine.models.cpu_linear import CpuLinearMaker, hold_packed
from pagestream.engine.models.decoder import TorchDecoder
from pagestream.engine.models.gguf_blocks import GgmlType, RawBlocks, dequantize
from pagestream.engine.models.hf import TransformersLM, load_transformers
from pagestream.engine.models.linear import Linear, LinearMakers
from pagestream.engine.models.linear_blocks import BlocksMaker, as_q4_1, below_one_another, unpacked
from pagestream.engine.models.loader import LoadedDecoder, load_decoder
from pagestream.kernels import block_quantise
from pagestream.kernels.cpu.ops import CpuOps, GgufBlocks, load_ops
from tests.engine.models.oracle import CHUNKS, CPU, LENGTHS, assert_rows_are_independent
from tests.engine.models.teacher import Teacher, alone, random_prompts
from tests.engine.models.test_gguf_file import write_gguf
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

LEAN = ("llama", "mistral", "qwen2", "qwen3", "phi3")
MODES = ("int4", "int8")
KINDS = {"int4": "Q4_1", "int8": "Q8_0"}


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    found = load_ops(2)
    assert found is not None, "these tests need a C++ compiler"
    return found


def load(path: Path, mode: str, *, reads_blocks: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any) -> LoadedDecoder:
    checkpoint = open_checkpoint(ModelConfig(model=str(path), quantization=mode, max_model_len=128, **options))
    return load_decoder(checkpoint, device=CPU, dtype=dtype, reads_blocks=reads_blocks)


def logits_of(loaded: LoadedDecoder, ops: CpuOps) -> list[Tensor]:
    model = CpuDecoder(loaded.spec, loaded.weights, loaded.shape, ops)
    return Teacher(model, random_prompts(LENGTHS, VOCAB_SIZE)).run(CHUNKS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", LEAN)
def test_packed_logits_are_bit_for_bit_those_of_the_unpacked_weights(ops: CpuOps, checkpoints: dict[str, Path], arch: str, mode: str):
    packed, plain = load(checkpoints[arch], mode), load(checkpoints[arch], mode, reads_blocks=False)
    assert isinstance(packed.weights.layers[1].gate_up, GgufBlocks)
    assert isinstance(plain.weights.layers[1].gate_up, Tensor)
    for got, want in zip(logits_of(packed, ops), logits_of(plain, ops), strict=True):
        assert torch.equal(got, want)


def distance_from_float32(folder: Path, mode: str, ops: CpuOps) -> float:
    """Of the operators' logits from those of plain torch with the same weights unpacked to float32, relative."""
    plain = load(folder, mode, reads_blocks=False, dtype=torch.float32)
    oracle = TorchDecoder(plain.spec, plain.weights, plain.shape, TorchAttention(), max_model_len=128)
    want = torch.cat(Teacher(oracle, random_prompts(LENGTHS, VOCAB_SIZE)).run(CHUNKS))
    return ((torch.cat(logits_of(load(folder, mode), ops)) - want).norm() / want.norm()).item()


@pytest.mark.parametrize("arch", LEAN)
def test_packed_logits_are_as_near_plain_torch_as_those_of_bfloat16_weights(ops: CpuOps, checkpoints: dict[str, Path], arch: str):
    """What is left is that the operators round to bfloat16 what enters a product, which these models' large weights amplify."""
    rounding = distance_from_float32(checkpoints[arch], "none", ops)
    assert rounding < 0.3
    for mode in MODES:
        assert distance_from_float32(checkpoints[arch], mode, ops) < 1.5 * rounding


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_rows_do_not_depend_on_company(ops: CpuOps, checkpoints: dict[str, Path], arch: str, mode: str):
    loaded = load(checkpoints[arch], mode)
    assert_rows_are_independent(CpuDecoder(loaded.spec, loaded.weights, loaded.shape, ops))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", LEAN)
def test_linears_are_converted_and_nothing_else(checkpoints: dict[str, Path], arch: str, mode: str):
    loaded = load(checkpoints[arch], mode)
    weights = loaded.weights
    for layer in weights.layers:
        assert {layer.qkv.kind, layer.o.kind, layer.gate_up.kind, layer.down.kind} == {KINDS[mode]}  # type: ignore[union-attr]
        rest = (layer.input_norm, layer.post_norm, layer.qkv_bias, layer.o_bias, layer.q_norm, layer.k_norm)
        assert {tensor.dtype for tensor in rest if tensor is not None} == {torch.bfloat16}
    assert isinstance(weights.head, GgufBlocks)
    assert weights.head.kind == "Q8_0"
    assert weights.embedding is weights.head or isinstance(weights.embedding, Tensor)
    assert dict(loaded.shape.weights_held_as).keys() == {KINDS[mode], "Q8_0", "bfloat16"}


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_converted_from_what_is_stored_not_from_the_dtype_served(checkpoints: dict[str, Path], mode: str):
    stored = load_file(checkpoints["llama"] / "model.safetensors")
    parts = [stored[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    want = block_quantise.quantise(torch.cat(parts), KINDS[mode])
    got = load(checkpoints["llama"], mode).weights.layers[0].qkv
    assert isinstance(got, GgufBlocks)
    assert torch.equal(got.data, want.data)
    assert not torch.equal(block_quantise.quantise(torch.cat(parts).bfloat16(), KINDS[mode]).data, want.data)


def test_dummy_weights_are_converted_too(checkpoints: dict[str, Path], tmp_path: Path):
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    loaded = load(tmp_path, "int4", load_format="dummy")
    assert isinstance(loaded.weights.layers[0].down, GgufBlocks)


GGUF_TENSORS = {
    "attn_q": (64, 64, "Q4_0"), "attn_k": (32, 64, "Q4_1"), "attn_v": (32, 64, "Q4_0"), "attn_output": (64, 64, "Q5_0"),
    "ffn_gate": (96, 64, "Q4_1"), "ffn_up": (96, 64, "Q8_0"), "ffn_down": (64, 96, "Q8_0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer whose tensors are stored in every way, and a head of 4 bits."""
    random = np.random.default_rng(0)
    values: dict[str, Any] = {
        "qwen3.context_length": 256, "qwen3.embedding_length": 64, "qwen3.block_count": 1, "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 16,
        "qwen3.attention.value_length": 16, "qwen3.attention.layer_norm_rms_epsilon": 1e-5, "qwen3.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{number}" for number in range(VOCAB_SIZE)],
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {"token_embd.weight": random.standard_normal((VOCAB_SIZE, 64))}
    kinds = {"token_embd.weight": GGMLQuantizationType.Q4_1}
    for name, (rows, columns, kind) in GGUF_TENSORS.items():
        tensors[f"blk.0.{name}.weight"] = random.standard_normal((rows, columns))
        kinds[f"blk.0.{name}.weight"] = GGMLQuantizationType[kind]
    norms = {"output_norm": 64, "blk.0.attn_norm": 64, "blk.0.ffn_norm": 64, "blk.0.attn_q_norm": 16, "blk.0.attn_k_norm": 16}
    tensors |= {f"{name}.weight": np.ones(size) for name, size in norms.items()}
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "mixed.gguf", "qwen3", values, tensors, kinds)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("auto", (None, None, None, "Q8_0", "Q4_1")),
        ("int4", ("Q4_1", "Q4_1", "Q4_1", "Q4_1", "Q4_1")),
        ("int8", ("Q4_1", "Q8_0", "Q8_0", "Q8_0", "Q4_1")),
    ],
)
def test_what_a_gguf_file_stores_in_as_few_bits_stays(mixed_gguf: Path, mode: str, kinds: tuple[str | None, ...]):
    weights = load(mixed_gguf, mode).weights
    layer = weights.layers[0]
    found = [getattr(weight, "kind", None) for weight in (layer.qkv, layer.o, layer.gate_up, layer.down, weights.head)]
    if mode == "int8":  # three parts of 4 bits keep them
        assert found[0] == "Q4_1"
    assert tuple(found) == kinds
    unchanged = load(mixed_gguf, "none", dtype=torch.float32).weights.layers[0]
    if mode != "auto":
        assert isinstance(layer.qkv, GgufBlocks)
        assert isinstance(unchanged.qkv, Tensor)
        assert torch.equal(unpacked(layer.qkv, torch.float32), unchanged.qkv)


def test_a_block_without_a_minimum_is_the_same_with_one():
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (9, 4, 18), dtype=torch.uint8, generator=generator)
    data[..., :2] = (torch.randn(9, 4, 1, generator=generator) * 10.0 ** torch.arange(-7, 2)[:, None, None]).half().view(torch.uint8)
    blocks = GgufBlocks("Q4_0", data.flatten(1))
    assert torch.equal(unpacked(as_q4_1(blocks), torch.float32), dequantize(RawBlocks(blocks.data, GgmlType.Q4_0)))


def test_parts_of_which_some_were_converted_on_another_device_come_together_there():
    parts = [torch.zeros(2, 20, dtype=torch.uint8), torch.zeros(3, 20, dtype=torch.uint8, device="meta")]
    whole = below_one_another(parts)
    assert (whole.shape, whole.device.type) == ((5, 20), "meta")


def test_what_has_no_blocks_is_refused_before_anything_is_loaded(tmp_path: Path):
    folder = make_checkpoint("llama", tmp_path, intermediate_size=100)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartError, match="quantization int4 needs multiples of 32, and intermediate_size is 100"):
        open_checkpoint(ModelConfig(model=str(folder), quantization="int4", load_format="dummy"))


def test_a_weight_that_is_not_finite_is_refused_by_name(checkpoints: dict[str, Path], tmp_path: Path):
    folder = Path(shutil.copytree(checkpoints["llama"], tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartError, match=r"model\.layers\.1\.mlp\.down_proj\.weight can't be held in 8 bits"):
        load(folder, "int8")


def hf_model(folder: Path, ops: CpuOps, mode: str, linears: LinearMakers) -> TransformersLM:
    config = ModelConfig(model=str(folder), quantization=mode, dtype="bfloat16")
    checkpoint = open_checkpoint(config)
    attention = CpuAttentionBackend(ops)
    return load_transformers(checkpoint, config, device=CPU, dtype=checkpoint.dtype, attention=attention, linears=linears)


def makers(ops: CpuOps, bits: int, hold: Any) -> LinearMakers:
    return LinearMakers(BlocksMaker(ops.quantise, bits, hold), BlocksMaker(ops.quantise, 8, hold))


@pytest.mark.parametrize(("mode", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("arch", ["opt", "gemma2"])
def test_models_of_transformers_compute_with_the_unpacked_weights(
    ops: CpuOps, checkpoints: dict[str, Path], arch: str, mode: str, bits: int
):
    make_plain = CpuLinearMaker(ops)

    def hold(blocks: GgufBlocks, bias: Tensor | None) -> Linear:
        return make_plain(unpacked(blocks, torch.bfloat16), bias)

    packed = hf_model(checkpoints[arch], ops, mode, makers(ops, bits, functools.partial(hold_packed, ops)))
    plain = hf_model(checkpoints[arch], ops, mode, makers(ops, bits, hold))
    prompt = random_prompts([40], VOCAB_SIZE)[0]
    assert torch.equal(alone(packed, prompt), alone(plain, prompt))
    assert dict(packed.shape.weights_held_as).keys() == {KINDS[mode], "Q8_0", "bfloat16"}
    if mode == "int4":
        assert_rows_are_independent(packed)


def test_a_mixture_of_experts_is_refused_by_the_matrix_that_is_in_no_linear(tmp_path: Path):
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    folder = make_checkpoint("qwen2_moe", tmp_path, hidden_size=64, num_hidden_layers=2, **options)
    config = ModelConfig(model=str(folder), quantization="int4")
    with pytest.raises(StartError, match=r"with quantization int4, model\.layers\.0\.mlp.* is in no linear"):
        load_transformers(open_checkpoint(config), config, device=CPU, dtype=torch.bfloat16, attention=TorchAttention())
