"""Constraints compiled for one vocabulary, on whatever thread asks, within limits of time and memory.

The library is llguidance: one wheel of 3 MB without dependencies for every Python since 3.9, where xgrammar brings a foreign-function
layer and asks for torch, transformers and triton; it compiles in milliseconds and builds its automata as they are walked, within
limits that it counts itself, so that no text can make compiling, or a step, take seconds; and it refuses what it can't enforce.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pagestream.engine.core.sampling_params import Constraint
from pagestream.engine.features.structured.languages import refusal, to_source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_KEPT = 64  # compiled constraints; one takes kilobytes to some megabytes
# Counted in the library's units: about 20 ms to compile the automata, 3 to 14 ms at the worst for one token.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,  # of up to 2 kB
    "precompute_large_lexemes": False,  # it has no limit
    "verbose_errors": False,
}

PLACE, EXCERPT = re.compile(r"^at \d+\(\d+\): "), re.compile(r"^ *\d+ \| ", re.MULTILINE)


class Vocabulary(Protocol):
    """The tokenizer, as far as it is needed here."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ConstraintCompiler:
    """Thread-safe.  A constraint is compiled once while it is in use; every sequence gets a copy of the fresh matcher.

    `vocab_size` is the model's, which may exceed the tokenizer's: logits have that many columns.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]):
        self._vocabulary = vocabulary
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None  # made when first needed, since it takes some tenths of a second
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """Compile it, for `matcher` to find.  Raises InvalidRequest naming the field and what is wrong with it."""
        self.matcher(constraint)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher of its own, before its first token.  Raises InvalidRequest."""
        key = (constraint.kind, constraint.text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found.deep_copy()
        made = self._compile(constraint)
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise refusal(constraint, "needs the package llguidance, which is not installed here") from None
        if not self._eos_token_ids:
            raise refusal(constraint, "needs a model with an end of sequence, and this one has none")
        source = to_source(constraint)
        limits: LLParserLimits = LLParserLimits(**LIMITS)
        try:
            made = LLMatcher(self._token_table(), source, log_level=0, limits=limits)
        except ValueError as error:
            raise refusal(constraint, f"can't be compiled: {error}") from error
        # The first mask as well: a language without any answer compiles, and only shows here.
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise refusal(constraint, f"can't be compiled: {reason_of(made.get_error(), constraint.kind == 'grammar')}")
        if made.is_stopped() and not made.is_accepting():
            raise refusal(constraint, "admits no answer at all")
        return made

    def _token_table(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                eos_token_ids = sorted(self._eos_token_ids)
                wrapper = TokenizerWrapper(TokenTable(self._vocabulary, self.vocab_size, eos_token_ids))
                self._tokens = LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=eos_token_ids)
            return self._tokens


def reason_of(error: str, is_own_grammar: bool) -> str:
    """In one line; the library also quotes the grammar, of which a caller has written a line only if all of it is theirs."""
    reason = error.partition("\n<state>")[0].partition("<non-verbose/>")[0]
    if not is_own_grammar:
        reason = PLACE.sub("", EXCERPT.split(reason, maxsplit=1)[0])
    return " ".join(reason.split())


class TokenTable:
    """The vocabulary in the shape that the library reads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]):
        known = min(vocabulary.vocab_size, vocab_size)
        self._vocabulary = vocabulary
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id: int | None = None
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = sorted({*(each for each in vocabulary.special_ids if each < vocab_size), *eos_token_ids})

    def __call__(self, text: str | bytes) -> Any:
        return self._vocabulary.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)
