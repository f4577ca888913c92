from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted
from pagestream.engine.sampling.penalties import Penalties

VOCAB_SIZE = 500


def admitted(seq_id: int, prompt: list[int], params: SamplingParams, output: list[int] = []) -> Admitted:  # noqa: B006
    return Admitted(seq_id, tuple(prompt), params, seed=0, output_token_ids=tuple(output))


def some_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows)) * 3


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_equals_transformers(penalty):
    rng = random.Random(1)
    penalties = Penalties()
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in (1, 30, 200)]
    outputs = [rng.choices(range(VOCAB_SIZE), k=length) for length in (0, 5, 90)]
    for seq_id, prompt in enumerate(prompts):
        penalties.admit(admitted(seq_id, prompt, SamplingParams(repetition_penalty=penalty)))
        penalties.observe(seq_id, outputs[seq_id])
    logits = some_logits(3)
    rows = [RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompts[i] + outputs[i]]), logits[i : i + 1]) for i in range(3)]
    assert penalties.apply(logits, [0, 1, 2])
    torch.testing.assert_close(logits, torch.cat(rows), atol=0, rtol=0)


def test_frequency_and_presence_count_the_output_only():
    penalties = Penalties()
    output = [7, 7, 7, 9, 400]
    params = SamplingParams(frequency_penalty=0.25, presence_penalty=-1.5)
    penalties.admit(admitted(1, [5, 9], params, output[:2]))
    penalties.observe(1, output[2:])
    logits = some_logits(1)
    wanted = logits.double()
    for token_id, times in Counter(output).items():
        wanted[0, token_id] -= 0.25 * times - 1.5
    assert penalties.apply(logits, [1])
    torch.testing.assert_close(logits.double(), wanted, atol=1e-6, rtol=0)


def test_others_are_left_alone():
    penalties = Penalties()
    penalties.admit(admitted(1, [5], SamplingParams(repetition_penalty=1.2)))
    penalties.admit(admitted(2, [5], SamplingParams()))
    penalties.admit(admitted(3, [5], SamplingParams(presence_penalty=1.0)))
    logits = some_logits(2)
    before = logits.clone()
    assert not penalties.apply(logits, [2, 3]), "nothing asked for, and nothing said yet"
    penalties.apply(logits, [2, 1])
    assert torch.equal(logits[0], before[0])
    assert (logits[1] != before[1]).nonzero().flatten().tolist() == [5]
    penalties.retire(1)
    penalties.retire(99)
    assert not penalties.apply(logits, [1, 2])


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
def test_extreme_penalties_give_no_nan(penalty):
    penalties = Penalties()
    penalties.admit(admitted(1, list(range(VOCAB_SIZE)), SamplingParams(repetition_penalty=penalty)))
    logits = some_logits(1)
    logits[0, 3] = 0.0
    penalties.apply(logits, [1])
    assert not logits.isnan().any()
    assert logits.max().isfinite()
