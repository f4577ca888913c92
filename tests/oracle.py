"""transformers as the oracle: one prompt at a time, greedy, in float32, with how sure it was of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Two float32 implementations of one model differ in the last bits of a logit; a token whose lead is smaller may differ.
TIE_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Reference:
    token_ids: list[int]
    margins: list[float]  # logit of the chosen token minus that of the next best


def reference_greedy(model: Any, prompt_token_ids: Sequence[int], num_tokens: int) -> Reference:
    """Tokens of `generate`, which never stops at an end of sequence here."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt_token_ids)]),
            attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    margins = []
    for scores in out.scores:
        best, second = scores[0].float().topk(2).values.tolist()
        margins.append(best - second)
    return Reference(out.sequences[0, len(prompt_token_ids) :].tolist(), margins)


def assert_same_until_tie(token_ids: Sequence[int], reference: Reference) -> None:
    """Equal tokens; the first that differs must be one whose margin is within the tolerance, and ends the comparison."""
    assert len(token_ids) == len(reference.token_ids)
    for position, (got, want) in enumerate(zip(token_ids, reference.token_ids, strict=True)):
        if got != want:
            margin = reference.margins[position]
            assert margin < TIE_TOLERANCE, f"token {position} is {got}, not {want}, whose margin is {margin:.4f}"
            return


def load_default_model(path: Path) -> Any:
    """The default model as transformers' own class, its weights read and dequantised by the gguf library."""
    import gguf
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    facts = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=facts["embedding_length"],
        intermediate_size=facts["feed_forward_length"],
        num_hidden_layers=facts["block_count"],
        num_attention_heads=facts["attention.head_count"],
        num_key_value_heads=facts["attention.head_count_kv"],
        max_position_embeddings=facts["context_length"],
        rms_norm_eps=facts["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, (".weight",))]
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
            if "q_proj" in name or "k_proj" in name:  # files of this kind hold the halves of each head's rotation interleaved
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                weight = weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            parameter.copy_(weight.view(parameter.shape))
    return model
