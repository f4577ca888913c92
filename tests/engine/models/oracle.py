"""What a model must agree with: transformers' own logits, and itself in other company."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagestream.engine.models.base import CausalLM
from tests.engine.models.teacher import Teacher, alone, random_prompts
from tests.tiny_models import VOCAB_SIZE

LENGTHS = [100, 37, 1, 16]
CHUNKS = [7, 1, 1, 40, 16]
CPU = torch.device("cpu")


@functools.cache
def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def reference_logits(folder: Path, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return reference_model(folder)(torch.tensor([prompt])).logits[0]


def assert_equals_reference(model: CausalLM, folder: Path) -> None:
    """Teacher-forced, a ragged batch in chunks, float32."""
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    for prompt, logits in zip(prompts, Teacher(model, prompts).run(CHUNKS), strict=True):
        torch.testing.assert_close(logits, reference_logits(folder, prompt), atol=3e-4, rtol=0)


def assert_rows_are_independent(model: CausalLM) -> None:
    """The same bits in one chunk of a batch of one as in small chunks beside others."""
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    for prompt, logits in zip(prompts, Teacher(model, prompts).run(CHUNKS), strict=True):
        assert torch.equal(alone(model, prompt), logits)
