"""The sampler against the oracle, in the interpreter: every processor, every truncation, ties, and the noise itself."""

from __future__ import annotations

import math

import pytest
import torch

from pagestream.kernels import reference, sampling
from pagestream.kernels.sampling import SamplingTable, sample

VOCAB = 300
PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
    "seed": 1,
    "position": 0,
}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """A vocabulary of some hundred tokens shall have several blocks, the last of them not full."""
    monkeypatch.setattr(sampling, "BLOCK", 128)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def to_bits(flags: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 32)).view(*flags.shape[:-1], -1, 32)
    words = (padded.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def make_table(rows: list[dict], *, counts=None, in_prompt=None, masks=None) -> SamplingTable:
    """Of a row of `counts` and `in_prompt` or of `masks` only what the rows refer to gets into the table, all of it once."""
    rows = [PLAIN | row for row in rows]
    floats, ints = torch.zeros(len(rows), 8), torch.zeros(len(rows), 8, dtype=torch.int64)
    words, mask_at = [0] * 4, {}
    for index in {row.get("mask_row", -1) for row in rows} - {-1}:
        mask_at[index] = len(words)
        words += to_bits(masks)[index].tolist()
    for r, row in enumerate(rows):
        floats[r, :6] = torch.tensor(
            [row[name] for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")]
        )
        said = torch.zeros(VOCAB, dtype=torch.bool)
        if (counts_row := row.get("counts_row", -1)) >= 0:
            said = (counts[counts_row] > 0) | in_prompt[counts_row]
        lists = [row.get("biases", {}), {t: float(counts[counts_row, t]) for t in said.nonzero()[:, 0].tolist()}]
        lists.append(dict.fromkeys(row.get("ruled_out", ()), 0.0))
        begins = []
        for entries in lists:
            begins.append(len(words))
            for token, value in entries.items():
                words += [token, torch.tensor(value).view(torch.int32).item()]
        ints[r] = torch.tensor([row["top_k"], row["seed"], row["position"], mask_at.get(row.get("mask_row"), 0), *begins, len(words)])
    return SamplingTable(floats, ints, torch.tensor(words, dtype=torch.int32))


def check(logits: torch.Tensor, rows: list[dict], *, counts=None, in_prompt=None, masks=None) -> torch.Tensor:
    """The kernel's tokens, each of which has the oracle's highest noisy score, and its logprob."""
    before = logits.clone()
    got = sample(logits, make_table(rows, counts=counts, in_prompt=in_prompt, masks=masks))
    assert torch.equal(logits, before)
    want_lse = logits.double().logsumexp(-1)
    torch.testing.assert_close(got.log_sum_exp.double(), want_lse, atol=1e-5, rtol=0)
    for r, row in enumerate(PLAIN | row for row in rows):
        counts_row, mask_row = row.get("counts_row", -1), row.get("mask_row", -1)
        x = reference.processed_logits(
            logits[r].clone(), biases=row.get("biases", {}), counts=None if counts_row < 0 else counts[counts_row],
            in_prompt=None if counts_row < 0 else in_prompt[counts_row], allowed=None if mask_row < 0 else masks[mask_row],
            repetition=row["repetition"], frequency=row["frequency"], presence=row["presence"],
        )  # fmt: skip
        x[list(row.get("ruled_out", ()))] = -math.inf
        scores = reference.sampling_scores(
            x, **{name: row[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")}
        )
        token = int(got.tokens[r])
        assert scores[token] >= scores.max() - 1e-4, f"row {r} chose {token}, not {int(scores.argmax())}"
        assert math.isclose(got.logprobs[r], logits[r, token].double() - want_lse[r], abs_tol=2e-5)
    return got.tokens


def test_noise_is_philox_of_seed_position_and_token():
    rows = [{"seed": seed, "position": position} for seed in (0, 7, -3, 2**63 - 1) for position in (0, 1, 70_000)]
    tokens = check(torch.zeros(len(rows), VOCAB), rows)  # equal logits: the noise alone decides
    assert len(set(tokens.tolist())) > 6


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.3, 1.0, 2.0])
def test_temperature(temperature):
    tokens = check(random_logits(4), [{"temperature": temperature, "seed": seed} for seed in range(4)])
    if temperature < 1e-5:
        assert torch.equal(tokens, random_logits(4).argmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 10, VOCAB - 1, VOCAB, VOCAB + 5])
def test_top_k(top_k):
    check(random_logits(3), [{"top_k": top_k, "seed": seed, "temperature": 2.0} for seed in range(3)])


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_top_p(top_p):
    check(random_logits(3), [{"top_p": top_p, "seed": seed, "temperature": 2.0} for seed in range(3)])


@pytest.mark.parametrize("min_p", [1e-4, 0.1, 1.0])
def test_min_p(min_p):
    check(random_logits(3), [{"min_p": min_p, "seed": seed, "temperature": 2.0} for seed in range(3)])


def test_all_truncations_together_and_apart_in_one_batch():
    rows = [{}, {"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.7}]
    rows += [{"top_k": 50, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.8, "min_p": 0.3}, {"temperature": 0.0, "top_k": 3}]
    logits = random_logits(len(rows))
    together = check(logits, rows)
    for r, row in enumerate(rows):
        assert sample(logits[r : r + 1], make_table([row])).tokens == together[r]


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.1017}, {"top_k": 40, "top_p": 0.51}, {"min_p": 0.5}])
def test_equal_scores_keep_the_lower_token_ids(truncation):
    """Of rows that are all equal, or have two values only, exactly as many stay as were asked for."""
    flat = torch.zeros(6, VOCAB)
    flat[3:, ::3] = 1.0
    rows = [truncation | {"seed": seed} for seed in range(6)]
    tokens = check(flat, rows)
    if truncation == {"top_k": 5}:
        assert tokens[:3].max() < 5
        assert set(tokens[3:].tolist()) <= {0, 3, 6, 9, 12}


def test_scores_of_both_signs_and_zero():
    logits = torch.linspace(-1, 1, VOCAB)[None].repeat(4, 1)
    logits[:, 150] = -0.0
    check(logits, [{"top_k": 149, "seed": seed} for seed in range(2)] + [{"top_p": 0.5}, {"top_p": 0.999}])


def test_penalties():
    counts, in_prompt = torch.zeros(2, VOCAB, dtype=torch.int32), torch.zeros(2, VOCAB, dtype=torch.bool)
    logits = random_logits(4)
    counts[1, logits[0].topk(20).indices] = torch.arange(20, dtype=torch.int32)
    in_prompt[1, logits[1].topk(9).indices] = True
    rows = [{"counts_row": 1, "temperature": 0.0, "repetition": 1.5}, {"counts_row": 1, "repetition": 0.5, "frequency": 0.2}]
    rows += [{"counts_row": 1, "presence": 2.0, "top_k": 4}, {"counts_row": 0, "presence": 2.0}]
    check(logits, rows, counts=counts, in_prompt=in_prompt)


def test_bias_and_mask():
    masks = torch.rand(3, VOCAB, generator=torch.Generator().manual_seed(1)) < 0.2
    masks[1] = False
    masks[1, 299] = True
    rows = [
        {"mask_row": 0},
        {"mask_row": 1, "top_p": 0.3},
        {"mask_row": 1, "biases": {299: -100.0}},
        {"biases": {5: 100.0, 131: -100.0}},
    ]
    rows += [{"biases": {7: 70.0, 280: 100.0}, "temperature": 0.0}, {"mask_row": 2, "top_k": 3}]
    tokens = check(random_logits(6), rows, masks=masks)
    assert tokens[1:5].tolist() == [299, 299, 5, 280]


def test_lists_are_applied_in_order_and_in_pieces(monkeypatch):
    """Bias, penalties, and then what is ruled out, which no bias brings back; longer than what is taken at a time."""
    monkeypatch.setattr(sampling, "ENTRIES", 16)
    counts, in_prompt = torch.zeros(1, VOCAB, dtype=torch.int32), torch.zeros(1, VOCAB, dtype=torch.bool)
    counts[0, ::3], in_prompt[0, 100:180] = 2, True
    biases = {token: 0.05 * token for token in range(VOCAB - 1, 200, -1)}
    row = {"counts_row": 0, "repetition": 1.3, "presence": 0.4, "frequency": 0.3, "biases": biases, "seed": 3}
    rows = [row | {"temperature": 0.0}, row | {"temperature": 2.0, "ruled_out": range(250, VOCAB)}, {}, {"ruled_out": range(299)}]
    rows += [row | {"ruled_out": [299, 299], "top_k": 9}]
    tokens = check(random_logits(5), rows, counts=counts, in_prompt=in_prompt)
    assert tokens[1] < 250
    assert tokens[3] == 299
    assert tokens[4] != 299


def test_a_penalty_is_rounded_as_in_plain_torch():
    """Greedy rows must not choose otherwise where two scores meet but for the last digit."""
    logits = random_logits(2)
    said = torch.arange(0, VOCAB, 2)
    counts, in_prompt = torch.zeros(1, VOCAB, dtype=torch.int32), torch.zeros(1, VOCAB, dtype=torch.bool)
    counts[0, said] = 3
    want = torch.where(logits > 0, logits / 1.1, logits * 1.1) - torch.tensor(0.3) * 3 - 0.7
    others = torch.where(torch.arange(VOCAB) % 2 == 1, want.max(-1, keepdim=True).values, -100.0)  # equal to the best of them
    logits[:, 1::2] = others[:, 1::2]
    row = {"counts_row": 0, "temperature": 0.0, "repetition": 1.1, "frequency": 0.3, "presence": 0.7}
    got = sample(logits, make_table([row, row], counts=counts, in_prompt=in_prompt)).tokens
    changed = torch.where(torch.arange(VOCAB) % 2 == 0, want, logits)
    assert torch.equal(got, changed.argmax(-1))


@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_k": 3}])
def test_a_mask_that_allows_nothing_gives_no_token(row):
    got = sample(random_logits(1), make_table([row | {"mask_row": 0}], masks=torch.zeros(1, VOCAB, dtype=torch.bool)))
    assert got.tokens.tolist() == [-1]


def test_half_precision_logits_and_a_slice_of_a_wider_matrix():
    check(random_logits(2).half(), [{}, {"top_k": 7}])
    wide = torch.randn(3, VOCAB + 20, generator=torch.Generator().manual_seed(0))
    check(wide[:, :VOCAB], [{}, {"top_p": 0.5}, {"temperature": 0.0}])


def test_draws_follow_the_probabilities():
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [3, 50, 200]] = torch.tensor([0.2, 0.5, 0.3]).log()
    tokens = sample(
        logits.expand(400, VOCAB).contiguous(), make_table([{"position": position} for position in range(400)])
    ).tokens
    shares = [(tokens == token).double().mean().item() for token in (3, 50, 200)]
    assert all(abs(share - want) < 0.08 for share, want in zip(shares, (0.2, 0.5, 0.3), strict=True))


def test_no_rows():
    assert sample(random_logits(0), make_table([])).tokens.shape == (0,)
