"""The data between core and runner: what one step is to compute, and what came of it.

Plain, frozen and picklable; tuples and numbers only, so that a plan can be compared byte by byte and sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pagestream.engine.core.request import Fault
from pagestream.engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block `source` onto `target`; which pools they belong to is said by the list it stands in."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence at its first appearance; sent once, so that later plans stay small."""

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int  # of this sequence: already differs among the n of a request
    output_token_ids: tuple[int, ...] = ()  # tokens it was born with
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from a row's logits; several where a group is about to fork.

    A beam's row is asked for candidates instead; its further samples are only names for beams that may be born of the step.
    """

    seq_id: int  # the sequence that the token will belong to; unborn yet for all but the first
    seed: int


class ScheduledSequence(NamedTuple):
    """One ragged row of the step: `token_ids` are computed at positions start, start + 1, …

    Unlike its neighbours a named tuple: every row of every step makes one, in a third of a frozen dataclass's time.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int  # position of the first of them; everything before is in the cache
    block_table: tuple[int, ...]  # block ids; covers start + len(token_ids) tokens
    samples: tuple[Sample, ...] = ()  # drawn from the last token's logits; none inside a prompt
    scored_token_ids: tuple[int, ...] = ()  # prompt logprobs: the token that follows each of the first rows
    num_pooled: int = 0  # an embedding: so many of its last tokens' hidden states belong to it


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Executed in this order: swap_out, swap_in, copies, forward, sample.

    All of it is idempotent: the same slots, the same copies, so a step that failed can be run again, whole or in parts.
    """

    step_id: int
    swap_out: tuple[BlockCopy, ...] = ()  # device block -> host block
    swap_in: tuple[BlockCopy, ...] = ()  # host block -> device block
    copies: tuple[BlockCopy, ...] = ()  # device block -> device block: copy-on-write
    admitted: tuple[Admitted, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    retired_seq_ids: tuple[int, ...] = ()  # never scheduled again; sent with the next plan

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's logprob and the likeliest tokens beside it, likeliest first; natural logarithm."""

    token_id: int
    logprob: float
    rank: int  # 1: it was the likeliest
    top: tuple[tuple[int, float], ...] = ()


Candidate = tuple[int, float]  # a token id and its logprob


class SampledTokens(NamedTuple):
    """What one sample of a row gave: a list of tokens, so that speculation changes no signature."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token where asked for
    cumulative_logprob: float = 0.0  # of these tokens; only where the request ranks its answers


NOT_FINITE = "the model's logits are not finite numbers"  # why a row failed: numbers went wrong, nothing was raised


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    sampled: dict[int, SampledTokens]  # by the sample's seq_id
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # seq_id -> one per scored token
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)  # a beam's seq_id -> its likeliest next tokens
    failed: dict[int, str] = field(default_factory=dict)  # row's seq_id -> why; found guilty by itself (NaN logits)
    pooled: dict[int, tuple[int, ...]] = field(default_factory=dict)  # seq_id -> sum of its pooled hidden states, in fixed point
    forward_s: float = field(default=0.0, compare=False)  # until the logits were there; what is left of the time is sampling
