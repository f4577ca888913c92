"""The lean decoder against transformers' own models, and its bits against chunking and company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagestream.engine.attention.torch_backend import TorchAttention
from pagestream.engine.core.config import ModelConfig
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.decoder import TorchDecoder
from pagestream.engine.models.loader import load_decoder
from tests.engine.models.oracle import CPU, assert_equals_reference, assert_rows_are_independent, reference_logits
from tests.engine.models.teacher import alone, random_prompts
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

LEAN = ("llama", "mistral", "qwen2", "qwen3", "phi3")
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}


def lean_model(folder: Path, dtype: str = "float32", served: int = 128) -> TorchDecoder:
    """Up to 128 tokens Phi-3 has its angles for short prompts."""
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), dtype=dtype, max_model_len=served))
    loaded = load_decoder(checkpoint, device=CPU, dtype=checkpoint.dtype)
    return TorchDecoder(loaded.spec, loaded.weights, loaded.shape, TorchAttention(), max_model_len=served)


@pytest.mark.parametrize("arch", LEAN)
def test_equals_transformers(checkpoints: dict[str, Path], arch: str) -> None:
    assert_equals_reference(lean_model(checkpoints[arch]), checkpoints[arch])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["mistral", "qwen3"])
def test_rows_do_not_depend_on_company(checkpoints: dict[str, Path], arch: str, dtype: str) -> None:
    assert_rows_are_independent(lean_model(checkpoints[arch], dtype))


@pytest.mark.parametrize("changes", [{"rope_parameters": YARN}, {"rope_parameters": LINEAR}, {"attention_bias": True}])
def test_variants_of_llama_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = make_checkpoint("llama", tmp_path, **changes)
    assert_equals_reference(lean_model(folder), folder)


def test_long_angles_are_taken_when_more_than_the_original_length_is_served(checkpoints: dict[str, Path]) -> None:
    long, short = lean_model(checkpoints["phi3"], served=512), lean_model(checkpoints["phi3"], served=128)
    prompt = random_prompts([200], VOCAB_SIZE)[0]
    begin = prompt[:50]

    def close(logits: Tensor, prompt: list[int]) -> None:
        torch.testing.assert_close(logits, reference_logits(checkpoints["phi3"], prompt), atol=3e-4, rtol=0)

    close(alone(long, prompt), prompt)
    close(alone(short, begin), begin)
    assert (alone(long, begin) - alone(short, begin)).abs().max() > 0.1


def test_logits_are_the_callers_to_change(checkpoints: dict[str, Path]) -> None:
    model = lean_model(checkpoints["llama"])
    hidden = torch.randn(3, 64)
    first = model.logits(hidden)
    expected = first.clone()
    first.fill_(0.0)
    assert torch.equal(model.logits(hidden), expected)
    assert expected.dtype == torch.float32
    assert expected.is_contiguous()
