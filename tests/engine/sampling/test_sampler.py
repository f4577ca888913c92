"""The sampler as the runner uses it."""

from __future__ import annotations

import random

import pytest
import torch

from pagestream.engine.core.errors import InvariantBroken
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted, Sample, SampledTokens, ScheduledSequence
from pagestream.engine.sampling.logprobs import prompt_logprobs
from pagestream.engine.sampling.sampler import Drawn, Sampler

VOCAB_SIZE = 5000
EOS = 2
PROMPT = (11, 12, 13, 11)
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.8, top_p=0.98, repetition_penalty=1.3),
    SamplingParams(top_k=50, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(top_k=400, temperature=1.5),
    SamplingParams(min_p=0.05, logprobs=20, logit_bias={4: 3.0, 70: -100.0}),
    SamplingParams(min_tokens=5, stop_token_ids={9}, logit_bias={9: 100.0, EOS: 90.0}),
    SamplingParams(allowed_token_ids=(3, 44, 45, 4999), n=2, best_of=3),
]


def some_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def row_of(seq_id: int, seed: int | None = None, token_ids: tuple[int, ...] = (13,), start: int = 3) -> ScheduledSequence:
    return ScheduledSequence(seq_id, token_ids, start, (), samples=(Sample(seq_id, seq_id if seed is None else seed),))


def sampler_of(params: dict[int, SamplingParams]) -> Sampler:
    sampler = Sampler(frozenset({EOS}))
    for seq_id, one in params.items():
        sampler.admit(Admitted(seq_id, PROMPT, one, seed=seq_id))
    return sampler


def run(params: dict[int, SamplingParams], logits: torch.Tensor, seed: int | None = None) -> Drawn:
    return sampler_of(params).sample(logits.clone(), [row_of(seq_id, seed) for seq_id in params])


@pytest.mark.parametrize(
    ("num_others", "vocab_size", "threads"), [(1, 5000, 1), (6, 5000, 2), (32, 5000, 2), (6, 49152, 2), (32, 50257, 2)]
)
def test_a_row_is_the_same_bits_in_any_company(num_others, vocab_size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = some_logits(len(KINDS) + num_others, num_others, vocab_size)
        alone = {i: run({i: one}, logits[i : i + 1]).sampled[i] for i, one in enumerate(KINDS)}
        rng = random.Random(num_others)
        for _ in range(3):
            params = dict(enumerate(KINDS)) | {len(KINDS) + i: rng.choice(KINDS) for i in range(num_others)}
            order = rng.sample(sorted(params), len(params))
            crowd = run({i: params[i] for i in order}, logits[order])
            assert {i: crowd.sampled[i] for i in alone} == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [1, 3, 33, 64])
def test_greedy_takes_the_lowest_of_equals(num_rows):
    logits = some_logits(num_rows).clamp(max=4.0)  # many tokens share the maximum
    drawn = run(dict.fromkeys(range(num_rows), KINDS[0]), logits)
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert [drawn.sampled[i] for i in range(num_rows)] == [SampledTokens((token_id,)) for token_id in wanted]


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-45}, {"temperature": 1e-4, "top_p": 1e-4}, {"top_k": 1}, {"top_p": 0}, {"temperature": 1e-5}]
)
def test_extreme_parameters_are_greedy_with_finite_logprobs(fields):
    logits = some_logits(4)
    greedy = run({i: SamplingParams(temperature=0, logprobs=5) for i in range(4)}, logits)
    extreme = run({i: SamplingParams(**fields, logprobs=5) for i in range(4)}, logits)
    assert extreme == greedy
    for one in extreme.sampled.values():
        assert one.logprobs is not None
        assert all(-100 < logprob <= 0 for _, logprob in one.logprobs[0].top)


def test_seeds_decide_and_nothing_else():
    logits = some_logits(1).expand(40, -1).contiguous()
    same = run(dict.fromkeys(range(40), SamplingParams(temperature=2)), logits, seed=7)
    other = run(dict.fromkeys(range(40), SamplingParams(temperature=2)), logits)
    assert len(set(same.sampled.values())) == 1
    assert len(set(other.sampled.values())) > 20


def test_samples_of_one_row_differ_by_seed():
    """A row that gives birth to several sequences gives each what it would have drawn alone."""
    logits = some_logits(2)
    sampler = sampler_of({5: SamplingParams(n=3, logprobs=1), 6: SamplingParams(temperature=0)})
    row = ScheduledSequence(5, PROMPT, 0, (), samples=(Sample(5, 100), Sample(8, 101), Sample(9, 102)))
    drawn = sampler.sample(logits.clone(), [row, row_of(6)])
    assert list(drawn.sampled) == [5, 8, 9, 6]
    for sample in row.samples:
        assert drawn.sampled[sample.seq_id] == run({5: SamplingParams(logprobs=1)}, logits[:1], seed=sample.seed).sampled[5]


def test_positions_draw_anew():
    sampler = sampler_of({1: SamplingParams(temperature=2)})
    logits = some_logits(1)
    drawn = [sampler.sample(logits.clone(), [row_of(1, 7, (20,), start)]).sampled[1].token_ids[0] for start in range(3, 33)]
    assert len(set(drawn)) > 15


def test_a_repeated_step_gives_the_same_and_counts_once():
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    once, twice = sampler_of({1: params}), sampler_of({1: params})
    for step in range(4, 12):
        logits = some_logits(1, seed=1)
        row = row_of(1, token_ids=(20 + step % 3,), start=step)
        first = once.sample(logits.clone(), [row])
        twice.admit(Admitted(1, PROMPT, params, seed=1))
        twice.sample(logits.clone(), [row])
        assert twice.sample(logits.clone(), [row]) == first


def test_recomputed_tokens_are_not_new():
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    straight, preempted = sampler_of({1: params}), sampler_of({1: params})
    for step in range(4, 8):
        straight.sample(some_logits(1), [row_of(1, token_ids=(21,), start=step)])
        if step < 7:
            preempted.sample(some_logits(1), [row_of(1, token_ids=(21,), start=step)])
    again = preempted.sample(some_logits(1, 3), [row_of(1, token_ids=(*PROMPT, 21, 21, 21, 21), start=0)])
    assert again == straight.sample(some_logits(1, 3), [row_of(1, token_ids=(21,), start=7)])


def test_params_of_a_sequence_are_kept():
    assert sampler_of({1: KINDS[3]}).params(1) is KINDS[3]


def test_a_gap_in_the_tokens_is_a_bug():
    with pytest.raises(InvariantBroken):
        sampler_of({1: SamplingParams()}).sample(some_logits(1), [row_of(1, start=9)])


def test_bad_rows_fail_alone():
    logits = some_logits(6)
    params = {i: KINDS[i % 4] for i in range(6)} | {5: SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)}
    healthy = run(params, logits)
    logits[1, 77] = torch.nan
    logits[2] = torch.inf
    logits[3] = -torch.inf
    drawn = run(params, logits)
    assert set(drawn.failed) == {1, 2, 3, 5}
    assert "not finite" in drawn.failed[1]
    assert "no token" in drawn.failed[5]
    assert drawn.sampled == {i: healthy.sampled[i] for i in (0, 4)}


def test_min_tokens_holds_off_the_end():
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids={9})
    sampler = sampler_of({1: params})
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [EOS, 9, 30]] = torch.tensor([9.0, 8.0, 7.0])
    drawn, token = [], PROMPT[-1]
    for start in range(3, 8):
        token = sampler.sample(logits.clone(), [row_of(1, token_ids=(token,), start=start)]).sampled[1].token_ids[0]
        drawn.append(token)
    assert drawn == [30, 30, 30, EOS, EOS]


def test_an_ignored_end_is_not_held_off():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS] = 9.0
    drawn = run({1: SamplingParams(temperature=0, min_tokens=3, ignore_eos=True)}, logits)
    assert drawn.sampled[1].token_ids == (EOS,)


def test_bias_forces_and_bans():
    drawn = run({1: SamplingParams(logit_bias={77: 100.0}), 2: SamplingParams(temperature=0)}, some_logits(2))
    assert drawn.sampled[1].token_ids == (77,)
    best = drawn.sampled[2].token_ids[0]
    banned = run({2: SamplingParams(temperature=0, logit_bias={best: -100.0})}, some_logits(2)[1:])
    assert banned.sampled[2].token_ids != (best,)


def test_logprobs_are_the_models_own():
    logits = some_logits(2)
    logits[0, 40] = -torch.inf
    params = SamplingParams(temperature=0.5, logprobs=4, logit_bias={40: 100.0}, allowed_token_ids=(40, 41, 42))
    wanted = torch.log_softmax(logits.double(), -1)
    one = run({1: params}, logits[:1]).sampled[1]
    assert one.logprobs is not None
    token_id, entry = one.token_ids[0], one.logprobs[0]
    logprob = max(float(wanted[0, token_id]), -9999.0)
    assert (entry.token_id, entry.rank) == (token_id, int((wanted[0] > wanted[0, token_id]).sum()) + 1)
    assert entry.logprob == pytest.approx(logprob, abs=1e-5)
    top = wanted[0].topk(4)
    assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_ruled_out_tokens_have_a_number_for_a_logprob():
    logits = some_logits(1)
    logits[0, 40] = -torch.inf
    one = run({1: SamplingParams(logprobs=0, repetition_penalty=2.0)}, logits, seed=1).sampled[1]
    assert one.logprobs is not None
    assert one.logprobs[0].top == ()
    entries = prompt_logprobs(logits, [40], 0)
    assert entries[0].logprob == -9999.0


def test_ranked_answers_carry_their_logprob():
    logits = some_logits(1)
    one = run({1: SamplingParams(best_of=2, temperature=0)}, logits).sampled[1]
    assert one.logprobs is None
    assert one.cumulative_logprob == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-5)


def test_prompt_logprobs_score_the_next_tokens():
    logits = some_logits(3, seed=8)
    wanted = torch.log_softmax(logits.double(), -1)
    entries = prompt_logprobs(logits, [5, 6, 4999], 2)
    assert [entry.token_id for entry in entries] == [5, 6, 4999]
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in entry.top] == wanted[row].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == ()


def test_retired_sequences_are_forgotten():
    sampler = sampler_of({1: KINDS[4], 2: KINDS[8]})
    for seq_id in (1, 2, 1, 77):
        sampler.retire(seq_id)
    sampler.admit(Admitted(1, PROMPT, KINDS[0], seed=0))
    drawn = sampler.sample(some_logits(1), [row_of(1)])
    assert drawn.sampled == run({1: KINDS[0]}, some_logits(1)).sampled
