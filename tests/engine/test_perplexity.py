"""How much worse the weights that are served predict a text than the same ones in bfloat16 or float32."""

from __future__ import annotations

import math
import pydoc_data.topics
from pathlib import Path

import pytest
import torch

from pagestream.engine import LLM, SamplingParams
from tests.oracle import load_default_model

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 1024  # tokens that are scored together
TEXTS = {
    "licence": (ROOT / "LICENSE").read_text(encoding="utf-8"),
    "manual": "\n".join(pydoc_data.topics.topics[topic] for topic in ("execmodel", "naming", "types")),
}

pytestmark = pytest.mark.slow


def perplexity(model: Path, text: str, **options: str) -> float:
    """Over windows of the text, each token given those before it in its window."""
    llm = LLM(str(model), kv_cache_memory=0.25, **options)  # type: ignore[arg-type]
    token_ids = llm.llm_engine.intake.tokenizer.encode(text)
    windows = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids), WINDOW)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate(prompt_token_ids=windows, sampling_params=params, use_tqdm=False)
    scores = [score.logprob for output in outputs for score in (output.prompt_logprobs or ())[1:] if score is not None]
    assert len(scores) == len(token_ids) - len(windows)
    return math.exp(-sum(scores) / len(scores))


@pytest.fixture(scope="module")
def dequantised(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's weights as a checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("dequantised")
    load_default_model(smollm2_path).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_own_4_bits_are_as_good_as_their_weights_in_bfloat16(smollm2_path: Path, name: str):
    own = perplexity(smollm2_path, TEXTS[name])
    unpacked = perplexity(smollm2_path, TEXTS[name], quantization="none")
    exact = perplexity(smollm2_path, TEXTS[name], quantization="none", dtype="float32")
    print(f"\n{name}: own blocks {own:.4f}, the same in bfloat16 {unpacked:.4f}, in float32 {exact:.4f}")
    assert abs(own / unpacked - 1) < 0.005
    assert abs(own / exact - 1) < 0.005


@pytest.mark.parametrize("name", TEXTS)
def test_converting_costs_little(smollm2_path: Path, dequantised: Path, name: str):
    """From bfloat16 weights that lie near a grid of 4 bits, as those of this model do."""
    found = {
        mode: perplexity(dequantised, TEXTS[name], quantization=mode, tokenizer=str(smollm2_path)) for mode in ("none", "int8", "int4")
    }
    print(f"\n{name}: " + ", ".join(f"{mode} {value:.4f}" for mode, value in found.items()))
    assert found["int8"] / found["none"] < 1.005
    assert found["int4"] / found["none"] < 1.02
