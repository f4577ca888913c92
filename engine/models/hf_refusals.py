"""What of transformers' models can't be served rightly, told by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.hf_rows import linear_weight
from pagestream.engine.models.linear_blocks import GROUP


def check_config(model_config: Any, name: str, config: ModelConfig) -> None:
    """Refuse what can be told from the config alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text_config = model_config.get_text_config()
    if model_config.is_encoder_decoder:
        raise refusal(name, "it is an encoder-decoder model")
    if text_config is not model_config:
        raise refusal(name, "it is a multimodal model")
    if not hasattr(model_config, "auto_map"):
        if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise refusal(name, "it does not generate text")
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
        if not getattr(model_class, "_supports_attention_backend", False):
            raise refusal(name, "transformers gives it no replaceable attention")
    positions = max_positions(text_config)
    if config.max_model_len is not None and config.max_model_len > positions:
        raise StartError(f"max_model_len {config.max_model_len} is more than the {positions} positions that the model knows")
    rope = getattr(text_config, "rope_parameters", None) or {}
    tables = [table for table in rope.values() if isinstance(table, Mapping)] or [rope]
    for table in tables:
        # Its angles change with the longest sequence of the batch, and the keys in the cache can't follow.
        original = table.get("original_max_position_embeddings") or positions
        if table.get("rope_type") == "longrope" and (config.max_model_len or positions) > original:
            raise refusal(name, f"its rotary embedding changes beyond {original} tokens; set --max-model-len {original}")


def check_linears(model_config: Any, name: str, config: ModelConfig) -> None:
    """Refuse to convert a model whose matrices are not all in linears with blocks of 32, by its modules without any weights."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # anything may come out of a model's own code
        raise refusal(name, f"with quantization {config.quantization} its modules can't be looked at ({first_line(error)})") from error
    for path, module in model.named_modules():
        matrices = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1]
        if matrices and not isinstance(module, nn.Embedding) and linear_weight(module) is None:
            raise refusal(name, f"with quantization {config.quantization}, {path}.{matrices[0]} is in no linear; leave it out")
        weight = linear_weight(module)
        if weight is not None and weight.shape[1] % GROUP:
            raise refusal(name, f"with quantization {config.quantization}, {path} has {weight.shape[1]} inputs, no multiple of {GROUP}")


def max_positions(text_config: Any) -> int:
    positions = getattr(text_config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else 2048


def refusal(name: str, why: str) -> StartError:
    return StartError(f"architecture {name} is not supported: {why}")


def first_line(error: BaseException) -> str:
    """And the second where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:300]
