"""The building blocks of the wire types: strict scalars, and the fields that may come in several shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    WithJsonSchema,
    model_validator,
)

from pagestream.engine import InvalidRequest

MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
PIECE = 1 << 16

# JSON's own kinds and no others: "yes" is no flag, true is no number, 1.5 and 1.0 are no counts.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Text = Annotated[str, Strict()]
BadWord = Annotated[Text, Field(min_length=1, max_length=256)]

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]  # a body has room for millions of items, and the first fault says enough


class WireModel(BaseModel):
    """An unknown field is refused, never ignored.  `unsupported` has known ones, with those values that ask for nothing, and
    `elsewhere` those of either kind whose value has a place after all: another field, or another route.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def keep_one_unknown_field(cls, value: Any) -> Any:
        """A body has room for hundreds of thousands, of which each would become a fault with its description."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in known)
        return {name: value[name] for name in value if name in known or name == unknown}


class ModelRequest(WireModel):
    """A body that asks something of a model."""

    model: Text = Field(description="A name that GET /v1/models lists.")


class MissingField(ValueError):
    """Raised with its name where only what else a part holds says that it needs it."""


class Written(Protocol):
    """A part of a content, in whichever API's shape."""

    text: str


def joined(content: str | Sequence[Written] | None) -> str:
    """A content of several parts is one text, of lines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def at_most(number: int) -> BeforeValidator:
    """For what would be looked through entry by entry before its length is."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise ValueError(f"at most {number} entries are allowed")
        return value

    return BeforeValidator(check)


def as_prompts(value: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Every shape of `prompt` as a list of prompts, each a text or token ids, whose upper end is the engine's to check.

    `name` is the field's; it takes at most so many.  Raises InvalidRequest.
    """

    def refused(message: str) -> InvalidRequest:
        return InvalidRequest(message, param=name)

    prompts = [value] if isinstance(value, str) or is_flat(value) else value
    if not isinstance(prompts, list):
        raise refused(f"{name} must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompts or [] in prompts or "" in prompts:
        raise refused(f"{name} must not be empty" if prompts in ([], [""], [[]]) else f"{name} holds an empty {name}")
    if len(prompts) > most:
        raise refused(f"{name} holds {len(prompts)} {name}s; at most {most} are allowed in one request")
    if all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    if not all(isinstance(prompt, list) for prompt in prompts):
        raise refused(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such lists, and not a mixture"
        )
    for prompt in prompts:
        # Piece by piece: within one nobody else has a turn, and there may be millions.
        pieces = (prompt[at : at + PIECE] for at in range(0, len(prompt), PIECE))
        if any(set(map(type, piece)) != {int} or min(piece) < 0 for piece in pieces):
            raise refused(f"token ids in {name} must be whole numbers from 0")
    return prompts


def is_flat(value: Any) -> bool:
    """Whether it is one prompt of token ids (or meant as one: the check of each id follows)."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)


def as_stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or any(not isinstance(text, str) or not text for text in stops):
        raise InvalidRequest("stop must be a non-empty string or a list of such strings", param="stop")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters", param="stop")
    return tuple(stops)


def as_early_stopping(value: Any) -> bool | str:
    if value is None:
        return False
    if not isinstance(value, bool) and value != "never":
        raise InvalidRequest('early_stopping must be true, false or "never"', param="early_stopping")
    return value


TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def prompt_schema(description: str, most: int) -> dict[str, Any]:
    return {
        "oneOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": most},
            TOKEN_IDS,
            {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": most},
        ],
        "description": description,
    }


PROMPT_SCHEMA = prompt_schema("One or more prompts, as text or as token ids.", MAX_PROMPTS)
STOP_SCHEMA = {
    "oneOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}, "maxItems": MAX_STOPS},
        {"type": "null"},
    ],
    "description": "The answer ends before the first of these, and does not hold it.",
}

Prompts = Annotated[list[str | list[int]], PlainValidator(as_prompts), WithJsonSchema(PROMPT_SCHEMA)]
Stops = Annotated[tuple[str, ...], PlainValidator(as_stops), WithJsonSchema(STOP_SCHEMA)]
EarlyStopping = Annotated[
    bool | str,
    PlainValidator(as_early_stopping),
    WithJsonSchema({
        # Not one enum of several types, for which generators of clients have no name.
        "anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["never"]}, {"type": "null"}],
        "description": "Beams: true ends at the width-th answer, false when no live beam is better, never when none can be.",
    }),
]
