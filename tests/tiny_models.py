"""Tiny random checkpoints of several architectures, in the form of a downloaded one: config, safetensors, tokenizer.

The weights are large, so that the likeliest token has a real margin and a wrong norm, window or rotary table changes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "opt")
VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **DECODER,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {**DECODER, "sliding_window": 24, "num_key_value_heads": 1, "head_dim": 32},
    "qwen2": {
        **DECODER,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**DECODER, "head_dim": 32, "num_hidden_layers": 2},
    "phi3": {
        **DECODER,
        "num_attention_heads": 2,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.05 * i for i in range(12)],
            "long_factor": [2.0 + 0.5 * i for i in range(12)],
        },
    },
    # Tied, its scaled embedding would outshine all layers, and every token would be followed by itself.
    "gemma2": {
        **DECODER,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 20.0,
        "tie_word_embeddings": False,
    },
    "opt": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
        "init_std": 0.35,
    },
}


def make_checkpoint(arch: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a checkpoint of one of ARCHITECTURES, or of another whose whole config is given as `changes`.  Returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(arch, **{**CONFIGS.get(arch, {}), **SPECIAL_TOKENS, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases start as zero and norms as one, which would hide a mistake in either
                parameter.add_(torch.randn_like(parameter) * (0.3 if "bias" in name else 0.1))
    model.generation_config = GenerationConfig(**SPECIAL_TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, *, specials: Sequence[str] = ()) -> None:
    """A byte-level BPE tokenizer of exactly VOCAB_SIZE tokens, with a chat template; `specials` are further special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *specials]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the quick brown fox jumps over the lazy dog and runs through the forest until the morning comes again"] * 8
    tokenizer.train_from_iterator(text, trainer)
    fill = [f"<unused_{number}>" for number in range(VOCAB_SIZE - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(fill)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
