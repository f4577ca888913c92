"""From the keys of a config.json to what the lean decoder is built by, and to what the rest of the engine knows of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.base import DecoderSpec
from pagestream.engine.models.rotary import number, rope_parameters, rope_table, rotary_spec

logger = logging.getLogger(__name__)

ARCHITECTURES = {  # by model_type, for configs that do not name their class
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
# What a key means where config.json leaves it out, as the class that wrote the file had it.
ABSENT_KEYS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
MAX_HEAD_SIZE, MAX_LAYERS = 1024, 1000  # beyond any model; before a corrupt number makes anything of its size
PER_LAYER_CHOICE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # their sliding window is for some of the layers


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Which tensors a checkpoint of the family has besides those that all of them have."""

    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied_head: bool


def architecture(config: Mapping[str, Any]) -> str:
    """The class that the checkpoint was written by; raises StartError if the config does not say."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        return ARCHITECTURES.get(model_type, model_type)
    raise StartError("config.json names neither architectures nor model_type")


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the lean decoder computes this model; what it does not know is left to transformers."""
    if architecture(config) not in ABSENT_KEYS or config.get("mlp_bias"):
        return False
    activation = config.get("hidden_act", "silu")
    return isinstance(activation, str) and activation in ACTIVATIONS


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048} | ABSENT_KEYS.get(architecture(config), {}) | dict(config)


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """Raises StartError naming a key that is missing, no number, or of a kind that is not supported."""
    config = with_defaults(config)
    hidden_size = positive(config, "hidden_size")
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_heads)
    head_size = positive(config, "head_dim", hidden_size // num_heads, limit=MAX_HEAD_SIZE)
    num_layers = positive(config, "num_hidden_layers", limit=MAX_LAYERS)
    if num_heads % num_kv_heads:
        raise StartError(f"config.json has {num_heads} attention heads, not a multiple of its {num_kv_heads} key-value heads")
    positions = max_positions(config)
    served = min(max_model_len or positions, positions)
    rotary = rotary_spec(rope_parameters(config), head_size=head_size, max_positions=positions, served_positions=served)
    return DecoderSpec(
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=positive(config, "vocab_size"),
        rms_norm_eps=small(config, "rms_norm_eps"),
        rotary=rotary,
        attention_scale=head_size**-0.5,
        windows=layer_windows(config, num_layers, served),
        activation=ACTIVATIONS[config.get("hidden_act", "silu")],
    )


def weight_layout(config: Mapping[str, Any]) -> WeightLayout:
    name = architecture(config)
    everywhere = bool(config.get("attention_bias")) and name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return WeightLayout(
        qkv_bias=everywhere or name == "Qwen2ForCausalLM" or bool(config.get("qkv_bias")),
        o_bias=everywhere,
        qk_norm=name == "Qwen3ForCausalLM",
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def layer_windows(config: Mapping[str, Any], num_layers: int, served_positions: int) -> tuple[int | None, ...]:
    """One per layer; a window that is never left is no window."""
    name = architecture(config)
    has_none = name == "LlamaForCausalLM" or (name in PER_LAYER_CHOICE and not config.get("use_sliding_window"))
    if has_none or config.get("sliding_window") is None:
        return (None,) * num_layers
    window = positive(config, "sliding_window")
    if window >= served_positions:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28) if name in PER_LAYER_CHOICE else 0
        kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * max(0, num_layers - first)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise StartError(f"config.json needs layer_types as a list of {num_layers}, one for each layer")
    if unknown := {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}:
        raise StartError(f"config.json has layer_types that are not supported: {', '.join(sorted(unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def max_positions(config: Mapping[str, Any]) -> int:
    """The model's own limit of prompt and answer together."""
    positions = positive(config, "max_position_embeddings", 2048)
    scaling = rope_table(config)
    keys = ("original_max_position_embeddings", "factor")
    if scaling.get("rope_type", scaling.get("type")) == "yarn" and all(map(scaling.get, keys)):
        original, factor = (number(scaling, key, 1.0) for key in keys)
        positions = max(positions, int(original * factor))
    return positions


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """generation_config.json knows better than config.json, which was often not adapted to the chat model.

    Ids outside the vocabulary, which no answer can end with, are left out.  Raises StartError for what is no token id.
    """
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token_id) is not int for token_id in token_ids):
        raise StartError(f"the model's eos_token_id must be a token id or a list of them, not {eos!r}"[:200])
    outside = sorted(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    if outside:
        logger.warning("eos_token_id %s is outside the vocabulary of %d tokens: no answer ends with it", outside, vocab_size)
    return frozenset(token_ids) - frozenset(outside)


def small(config: Mapping[str, Any], key: str) -> float:
    """A number from 0 to 1."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise StartError(f"the model's config needs {key} as a number from 0 to 1, not {value!r}"[:200])
    return float(value)


def positive(config: Mapping[str, Any], key: str, default: int | None = None, *, limit: int = 1 << 31) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise StartError(f"the model's config needs {key} as a whole number from 1 to {limit}, not {value!r}"[:200])
    return value
