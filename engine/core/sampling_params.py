"""How to choose the next token and when to stop: one request's wishes, validated where they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream.engine.core.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_NUM_SEQUENCES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_BAD_WORDS = 64
MAX_LENGTH_PENALTY = 16
MAX_BEAM_STOPS = 256  # so many continuations of each beam are looked at in every step, besides the width

# What beam search goes together with; the first is named where something else was asked for.
BEAM_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "bad_words": ((),),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "stop": ((),),
    "logit_bias": ((),),
    "allowed_token_ids": (None,),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language that an answer must belong to: what, not how.  Which kinds there are is up to whoever enforces it."""

    kind: str  # json_schema | regex | choice | …
    text: str  # in the notation of that kind
    param: str = "constraint"  # how the caller calls it, for refusals


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the caller asks of the sampler.

    Raises InvalidRequest naming the field.  Lists, sets and dicts are taken where a tuple is stored.
    Sources: OpenAI's completions reference for the names and ranges, vLLM's SamplingParams for the rest.
    """

    n: int = 1  # answers per prompt
    best_of: int | None = None  # answers generated, of which the n likeliest are returned; None: n
    use_beam_search: bool = False  # best_of is the width then
    length_penalty: float = 1.0  # beams: above 0 favours long answers, below 0 short ones
    early_stopping: bool | str = False  # beams: True, False or "never"; see beam_search.BeamRules
    max_tokens: int | None = 16  # None: as many as the context has room for
    min_tokens: int = 0  # no end of sequence and no stop before
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    typical_p: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    logprobs: int | None = None  # that many likeliest tokens at each position, besides the chosen one
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens
    seed: int | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same as token ids; made of bad_words where the request is taken in
    constraint: Constraint | None = None  # the whole answer belongs to this language, unless something else ends it first

    def __post_init__(self) -> None:
        stored: tuple[tuple[str, Callable[[Any], Any]], ...] = (
            ("stop", as_strings),
            ("bad_words", as_strings),
            ("bad_word_ids", lambda words: tuple(map(tuple, words))),
            ("stop_token_ids", lambda token_ids: frozenset(token_ids or ())),
            ("logit_bias", as_bias),
            ("allowed_token_ids", lambda token_ids: None if token_ids is None else tuple(token_ids)),
        )
        for name, make in stored:
            try:
                object.__setattr__(self, name, make(getattr(self, name)))
            except TypeError:
                raise InvalidRequest(f"{name} must be a list, not {getattr(self, name)!r}"[:200], param=name) from None
        in_range("n", self.n, 1, MAX_NUM_SEQUENCES, whole=True)
        if self.best_of is not None:
            in_range("best_of", self.best_of, 1, MAX_NUM_SEQUENCES, whole=True)
            if self.best_of < self.n:
                raise InvalidRequest(f"best_of is {self.best_of} and must be at least n, which is {self.n}", param="best_of")
        if self.max_tokens is not None:
            in_range("max_tokens", self.max_tokens, 0, None, whole=True)
        in_range("min_tokens", self.min_tokens, 0, self.max_tokens, whole=True)
        in_range("temperature", self.temperature, 0.0, 2.0)
        in_range("top_p", self.top_p, 0.0, 1.0)
        in_range("top_k", self.top_k, -1, None, whole=True)
        in_range("min_p", self.min_p, 0.0, 1.0)
        in_range("typical_p", self.typical_p, 0.0, 1.0)
        if self.typical_p == 0:
            raise InvalidRequest("typical_p must be above 0", param="typical_p")
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        in_range("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
        if self.seed is not None:
            in_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED, whole=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 0, MAX_LOGPROBS, whole=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}"[:200], param=name)
        self._check_lists()
        self._check_beams()
        self._check_constraint()

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed", param="stop")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words has {len(self.bad_words)} words; at most {MAX_BAD_WORDS} are allowed", param="bad_words")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise InvalidRequest(f"{name} must hold non-empty strings", param=name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if any(type(token_id) is not int or token_id < 0 for token_id in getattr(self, name) or ()):
                raise InvalidRequest(f"{name} must hold token ids, whole numbers from 0", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidRequest(f"logit_bias names the token {token_id}; ids start at 0", param="logit_bias")
            in_range("logit_bias", bias, -100.0, 100.0)

    def _check_beams(self) -> None:
        """Beams are ranked by the model's own logprobs, so that whatever changes or cuts those contradicts them."""
        if not isinstance(self.use_beam_search, bool):
            raise InvalidRequest("use_beam_search must be true or false", param="use_beam_search")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(f"early_stopping must be true, false or \"never\", not {self.early_stopping!r}", param="early_stopping")
        in_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidRequest(f"{name} is only allowed with use_beam_search", param=name)
            return
        if self.num_sequences < 2:
            raise InvalidRequest("use_beam_search needs a width of at least 2: best_of or, without it, n", param="use_beam_search")
        if len(self.stop_token_ids) > MAX_BEAM_STOPS:
            raise InvalidRequest(f"use_beam_search goes with at most {MAX_BEAM_STOPS} stop_token_ids", param="stop_token_ids")
        for name, allowed in BEAM_VALUES.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"use_beam_search needs {name} {allowed[0]!r}, not {getattr(self, name)!r}", param=name)

    def _check_constraint(self) -> None:
        """Refuses what could leave a constrained answer without any token to go on with, or without its end, and beams."""
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise InvalidRequest(f"constraint must be a Constraint, not {self.constraint!r}"[:200], param="constraint")
        for name, is_set in (
            ("use_beam_search", self.use_beam_search),
            ("min_tokens", self.min_tokens > 0),
            ("ignore_eos", self.ignore_eos),
            ("allowed_token_ids", self.allowed_token_ids is not None),
            ("bad_words", bool(self.bad_words)),
        ):
            if self.constraint is not None and is_set:
                raise InvalidRequest(f"{name} can't be combined with {self.constraint.param}", param=name)

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated for one prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_answers(self) -> bool:
        """Whether which answers are returned is known at their end only."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen: also for a temperature too small to divide by, or a top_p of 0."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0

    def highest_token_id(self) -> tuple[str, int] | None:
        """The field that names the highest token id, and that id, for the check against the vocabulary; None without any."""
        named = [("logit_bias", token_id) for token_id, _ in self.logit_bias]
        named += [("stop_token_ids", token_id) for token_id in self.stop_token_ids]
        named += [("allowed_token_ids", token_id) for token_id in self.allowed_token_ids or ()]
        return max(named, key=lambda pair: pair[1], default=None)


def as_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def as_bias(value: Mapping[Any, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in the order of the ids; keys may be written as text, as JSON has them."""
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    try:
        return tuple(sorted((int(token_id), float(bias)) for token_id, bias in pairs))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias") from None


def in_range(name: str, value: Any, low: float | None, high: float | None, *, whole: bool = False) -> None:
    """Raises InvalidRequest unless the value is a finite number of the right kind within [low, high]; None is no bound."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not is_finite(value):
        raise InvalidRequest(f"{name} must be a {'whole' if whole else 'finite'} number, not {str(value)[:40]!r}", param=name)
    if low is not None and value < low or high is not None and value > high:
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value}", param=name)


def is_finite(value: float) -> bool:
    """Whole numbers beyond all floats count as infinite."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
