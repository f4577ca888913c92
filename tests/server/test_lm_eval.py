"""lm-eval's own client scores a task over /v1/completions.  It brings 600 MB of packages: `pip install -e '.[clients]'`; hence slow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.clients import tiny_server
from tests.server.conftest import Live

pytestmark = pytest.mark.slow

WORDS = "the quick brown fox jumps over lazy dog and runs through forest until morning comes again 京都 né".split()
NUM_ITEMS, NUM_CHOICES = 36, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "long"


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with tiny_server(folder) as server:
        yield server


def make_items() -> list[dict[str, Any]]:
    draw = random.Random(3)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {"context": words(3, 30), "choices": [words(1, 6) for _ in range(NUM_CHOICES)], "answer": draw.randrange(NUM_CHOICES)}
        for _ in range(NUM_ITEMS)
    ]


def expected_scores(folder: Path, items: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    """Of each choice after its context and a space: the sum of its tokens' logprobs, and whether each was the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(context: str, choice: str) -> tuple[float, bool]:
        whole = tokenizer.encode(f"{context} {choice}")
        start = len(tokenizer.encode(context))
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        steps = range(start, len(whole))
        is_greedy = all(int(logprobs[at - 1].argmax()) == whole[at] for at in steps)
        return sum(float(logprobs[at - 1, whole[at]]) for at in steps), is_greedy

    return [[score(item["context"], choice) for choice in item["choices"]] for item in items]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_loglikelihood_task_scores_as_transformers_does(live: Live, folder: Path, tmp_path, monkeypatch, batch_size):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval

    items = make_items()
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": "small_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    model_args = {
        "model": "m",
        "base_url": f"{live.url}/v1/completions",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_length": 512,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=model_args, tasks=[task], batch_size=batch_size, log_samples=True, bootstrap_iters=0
    )
    samples = sorted(found["samples"]["small_choices"], key=lambda sample: sample["doc_id"])
    assert len(samples) == NUM_ITEMS
    want = expected_scores(folder, items)
    for sample, scores in zip(samples, want, strict=True):
        for (logprob, is_greedy), (wanted, was_greedy) in zip(sample["filtered_resps"], scores, strict=True):
            assert float(logprob) == pytest.approx(wanted, abs=1e-2)
            assert is_greedy == was_greedy
    right = [max(range(NUM_CHOICES), key=[score for score, _ in scores].__getitem__) == item["answer"] for item, scores in zip(items, want, strict=True)]
    assert found["results"]["small_choices"]["acc,none"] == pytest.approx(sum(right) / NUM_ITEMS)
