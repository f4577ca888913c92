"""bad_words and typical_p, at the processors and through the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from pagestream.engine import LLM, InvalidRequest, SamplingParams
from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.sampling.bad_words import BadWords
from pagestream.engine.sampling.typical import typical


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
def test_typical_tokens_are_those_of_transformers(mass, temperature):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    warped = TypicalLogitsWarper(mass=mass)(torch.zeros(6, 1, dtype=torch.long), logits / temperature)
    for row in range(6):
        assert (typical(logits[row].numpy(), temperature, mass) == torch.isfinite(warped[row]).numpy()).all()


def test_what_was_ruled_out_stays_out():
    scores = np.array([0.0, -np.inf, 1.0, -np.inf], np.float32)
    assert typical(scores, 1.0, 0.9999).tolist() == [True, False, True, False]


def said(processor: BadWords, *token_ids: int) -> list[int]:
    processor.observe(1, token_ids)
    logits = torch.zeros(1, 20)
    processor.apply(logits, [1])
    return torch.isinf(logits[0]).nonzero().flatten().tolist()


def test_a_word_is_stopped_at_its_last_token():
    processor = BadWords()
    params = SamplingParams(bad_word_ids=((5,), (1, 2), (1, 1, 3)))
    processor.admit(Admitted(1, (1, 1), params, 0, output_token_ids=(9,)))
    assert said(processor) == [5], "the prompt does not count"
    assert said(processor, 1) == [2, 5]
    assert said(processor, 1) == [2, 3, 5]
    assert said(processor, 4) == [5]
    assert said(processor, 1, 1) == [2, 3, 5]
    processor.retire(1)
    assert said(processor) == []


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(model=str(tiny_llama), num_kv_blocks=256, device="cpu", cpu_threads=1)


def test_an_answer_avoids_its_bad_words(llm):
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (free,) = llm.generate("the quick", plain, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    said_ids = free.outputs[0].token_ids
    word = next(text for each in said_ids if tokenizer.encode(text := tokenizer.decode([each]), False) == [each])
    held = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=(word,))
    (other,) = llm.generate("the quick", held, use_tqdm=False)
    ids, bad = other.outputs[0].token_ids, tuple(tokenizer.encode(word, False))
    assert all(ids[at : at + len(bad)] != bad for at in range(len(ids)))
    assert ids != free.outputs[0].token_ids


def test_typical_p_narrows_what_is_said_and_company_changes_nothing(llm):
    params = [SamplingParams(temperature=1, typical_p=0.2, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(6)]
    together = llm.generate(["a fox"] * 6, params, use_tqdm=False)
    for one, output in zip(params, together, strict=True):
        assert llm.generate("a fox", one, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("field", [{"typical_p": 0.0}, {"typical_p": 1.5}, {"bad_words": ("",)}, {"bad_words": ("a",) * 65}])
def test_values_that_make_no_sense_are_refused(field):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**field)
    assert refusal.value.param == next(iter(field))
