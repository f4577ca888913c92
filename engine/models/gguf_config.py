"""A GGUF file's metadata in the terms of a Hugging Face config.json, so that everything after the reader sees one form."""

from __future__ import annotations

import math
from typing import Any

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.gguf_file import GgufFile, GgufTensor

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}  # Mistral's files say llama
# The token at the end of a text, of a turn, of a message to a tool.
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Raises StartError for an architecture that the lean decoder does not compute, and for sizes that are missing or no numbers."""
    arch = file.get("general.architecture")
    if not isinstance(arch, str) or arch not in MODEL_TYPES:
        raise StartError(f"{file.path} holds a model of architecture {arch!r}; GGUF files of {', '.join(MODEL_TYPES)} are supported")
    if f"{arch}.expert_count" in file.values and number(file, f"{arch}.expert_count"):
        raise StartError(f"{file.path} holds a mixture of experts, which is not supported as GGUF")

    def count(key: str, default: int | None = None) -> int:
        value = number(file, f"{arch}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise StartError(f"{file.path} has {value!r} as {arch}.{key}, which must be a positive whole number")
        return value

    embedding = tensor(file, "token_embd.weight")
    hidden_size = count("embedding_length")
    num_heads = count("attention.head_count")
    head_size = count("attention.key_length", max(1, hidden_size // num_heads))
    if count("attention.value_length", head_size) != head_size:
        raise StartError(f"{file.path} has values of another size than its keys, which is not supported")
    return {
        "model_type": MODEL_TYPES[arch],
        "hidden_size": hidden_size,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": count("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": number(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": count("context_length"),
        "sliding_window": number(file, f"{arch}.attention.sliding_window", 0) or None,
        "use_sliding_window": False,
        "rope_parameters": rope_table(file, arch, count("rope.dimension_count", head_size) / head_size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "eos_token_id": [number(file, key) for key in END_KEYS if key in file.values],
    }


def rope_table(file: GgufFile, arch: str, rotary_factor: float) -> dict[str, Any]:
    """The rope_parameters of a config.json; the factors that some files hold as tensors go in as lists."""
    prefix = f"{arch}.rope."
    rope_type = file.get(prefix + "scaling.type", "none")
    table: dict[str, Any] = {
        "rope_type": "default" if rope_type == "none" else str(rope_type),
        "rope_theta": number(file, prefix + "freq_base", 10_000.0),
        "partial_rotary_factor": rotary_factor,
    }
    for key, stored in (
        ("factor", "scaling.factor"),
        ("original_max_position_embeddings", "scaling.original_context_length"),
        ("attention_factor", "scaling.attn_factor"),
    ):
        if prefix + stored in file.values:
            table[key] = number(file, prefix + stored)
    if "rope_freqs.weight" in file.tensors:
        table["freq_factors"] = file.load("rope_freqs.weight").tolist()
    if "rope_factors_long.weight" in file.tensors:
        table["rope_type"] = "longrope"
        table["long_factor"] = file.load("rope_factors_long.weight").tolist()
        table["short_factor"] = file.load(tensor(file, "rope_factors_short.weight").name).tolist()
    return table


def number(file: GgufFile, key: str, default: float | None = None) -> Any:
    """A finite number of the metadata; an array of equal ones, as files with one per layer have, counts as one."""
    value = file.get(key, default)
    if isinstance(value, list):
        value = value[0] if value and len(set(value)) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StartError(f"{file.path} needs one number as {key}")
    return value


def tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise StartError(f"{file.path} has no tensor {name}")
    return file.tensors[name]
