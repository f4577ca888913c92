"""Kinds of constraints, as the texts that llguidance compiles.

Every kind has a limit on its size; what a text of that size may cost in time is bounded by the compiler's own limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from pagestream.engine.core.errors import InvalidRequest
from pagestream.engine.core.sampling_params import Constraint

MAX_CONSTRAINT_CHARS = 1 << 16
MAX_CHOICES = 1000
# JSON allows whitespace without end between two tokens, and a weak model may never leave it.
WHITESPACE_PATTERN = r"[\x20\x0A]{1,20}"


def to_source(constraint: Constraint) -> str:
    """The constraint in the library's own form; whether it is valid shows when it is compiled.  Raises InvalidRequest."""
    if len(constraint.text) > MAX_CONSTRAINT_CHARS:
        raise refusal(constraint, f"has {len(constraint.text)} characters; at most {MAX_CONSTRAINT_CHARS} are allowed")
    make = KINDS.get(constraint.kind)
    if make is None:
        raise refusal(constraint, f"has an unknown kind {constraint.kind[:40]!r}; there are {', '.join(KINDS)}")
    try:
        return make(constraint.text)
    except InvalidRequest as error:
        raise refusal(constraint, error.message) from error
    except (ValueError, RecursionError) as error:
        raise refusal(constraint, f"can't be read: {error}") from error


def refusal(constraint: Constraint, what: str) -> InvalidRequest:
    return InvalidRequest(f"{constraint.param} {what}"[:480], param=constraint.param, code="invalid_constraint")


def from_json_schema(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE_PATTERN})


def from_regex(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


def from_choices(text: str) -> str:
    from llguidance import LLMatcher

    choices = json.loads(text)
    if not choices or len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"must hold 1 to {MAX_CHOICES} choices, not {len(choices)}")
    if any(not isinstance(choice, str) or not choice for choice in choices):
        raise InvalidRequest("must hold non-empty strings")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def from_rules(text: str) -> str:
    """Lark's notation, or GBNF's, which is told by its ::= signs."""
    from llguidance import grammar_from

    return grammar_from("grammar" if "::=" in text else "lark", text)


def from_lark(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


KINDS: dict[str, Callable[[str], str]] = {
    "json_schema": from_json_schema,
    "regex": from_regex,
    "choice": from_choices,
    "grammar": from_rules,
    "lark": from_lark,  # where the notation is known: what a rule quotes may look like GBNF
}
