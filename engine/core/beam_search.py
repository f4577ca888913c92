"""Beam search: which continuations live on, which are answers, and when it is over.  Pure functions of what is given.

Source: the beam search of transformers' `generate`, whose answers and order these are.  A live beam has no score but the sum of its
logprobs; an answer's score is that sum divided by its length to the power of the length penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Candidate, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamRules:
    width: int  # beams that live, and answers that are kept
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str  # True: at the width-th answer; False: when no live beam is better now; "never": when none can be
    end_token_ids: frozenset[int]
    num_top_logprobs: int | None = None  # to be kept with each token; None: no logprobs at all

    @classmethod
    def of(cls, params: SamplingParams, max_tokens: int, eos_token_ids: frozenset[int]) -> BeamRules:
        return cls(
            params.num_sequences,
            max_tokens,
            params.length_penalty,
            params.early_stopping,
            end_token_ids(params, eos_token_ids),
            params.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer, or a whole one."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    parent: int = 0  # its place among those that lived before this step
    score: float = 0.0  # only of a whole answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token where they are kept


@dataclass(frozen=True, slots=True)
class BeamStep:
    live: tuple[Beam, ...]  # likeliest first; at most `width`
    answers: tuple[Beam, ...]  # best first; at most `width`
    is_done: bool


def end_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids


def num_candidates(params: SamplingParams, eos_token_ids: frozenset[int]) -> int:
    """Continuations of one beam that are looked at: so many that `width` of them go on even where all that can end it come first."""
    return params.num_sequences + len(end_token_ids(params, eos_token_ids))


def advance(live: Sequence[Beam], answers: Sequence[Beam], candidates: Sequence[Sequence[Candidate]], rules: BeamRules) -> BeamStep:
    """One step of all beams.  `candidates` are each live beam's likeliest next tokens, likeliest first."""
    num_tokens = len(live[0].token_ids) + 1
    sums = [
        (beam.cumulative_logprob + logprob, parent, place)
        for parent, (beam, found) in enumerate(zip(live, candidates, strict=True))
        for place, (_, logprob) in enumerate(found)
    ]
    sums.sort(key=lambda one: (-one[0], one[1], one[2]))
    survivors: list[Beam] = []
    new_answers: list[Beam] = []
    num_looked_at = rules.width * max(2, 1 + len(rules.end_token_ids))
    for rank, (total, parent, place) in enumerate(sums[:num_looked_at]):
        ends = num_tokens >= rules.max_tokens or candidates[parent][place][0] in rules.end_token_ids
        # An ending among the spare candidates is not an answer: it is less likely than `width` others.
        if ends and rank < rules.width:
            new_answers.append(grown(live[parent], parent, total, candidates[parent], place, rules))
        elif not ends and len(survivors) < rules.width:
            survivors.append(grown(live[parent], parent, total, candidates[parent], place, rules))
    kept = sorted((*answers, *new_answers), key=lambda answer: -answer.score)[: rules.width]
    return BeamStep(tuple(survivors), tuple(kept), is_over(survivors, kept, num_tokens, rules))


def grown(beam: Beam, parent: int, total: float, found: Sequence[Candidate], place: int, rules: BeamRules) -> Beam:
    token_id, logprob = found[place]
    token_ids = (*beam.token_ids, token_id)
    logprobs = beam.logprobs
    if rules.num_top_logprobs is not None:
        logprobs = (*logprobs, TokenLogprobs(token_id, logprob, place + 1, tuple(found[: rules.num_top_logprobs])))
    return Beam(token_ids, total, parent, total / len(token_ids) ** rules.length_penalty, logprobs)


def is_over(live: Sequence[Beam], answers: Sequence[Beam], num_tokens: int, rules: BeamRules) -> bool:
    """Whether the answers can't get better, or not by what `early_stopping` still looks for."""
    if not live:
        return True
    if len(answers) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    # The most hopeful length of an answer to come: with "never" the longest one, where length is rewarded.
    looks_far = rules.early_stopping == "never" and rules.length_penalty > 0
    length = rules.max_tokens if looks_far else num_tokens
    return live[0].cumulative_logprob / length**rules.length_penalty <= answers[-1].score
