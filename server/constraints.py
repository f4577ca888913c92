"""The wire types of structured output, and the constraint that a request asks for."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pagestream.engine import Constraint, InvalidRequest
from pagestream.server.fields import Flag, Text, WireModel

MAX_FORMAT_NAME = 64
ANY_OBJECT = {"type": "object"}


class JsonSchemaFormat(WireModel):
    """`strict` changes nothing: an answer always fits the schema, and a schema that can't be enforced is refused."""

    name: Text | None = Field(None, max_length=MAX_FORMAT_NAME)
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="A JSON Schema.")
    strict: Flag | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Only with type json_schema.")

    @model_validator(mode="after")
    def check(self) -> Self:
        has_schema = self.json_schema is not None and self.json_schema.json_schema is not None
        if self.type == "json_schema" and not has_schema:
            raise InvalidRequest("response_format of type json_schema needs json_schema.schema", param="response_format.json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidRequest("json_schema is only allowed with type json_schema", param="response_format.json_schema")
        return self

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        schema = ANY_OBJECT if self.json_schema is None else self.json_schema.json_schema
        return Constraint("json_schema", as_text(schema), "response_format")


class StructuredOutputs(WireModel):
    """Exactly one of its fields."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json", description="A JSON Schema, as an object or as text.")
    regex: Text | None = Field(None, min_length=1, description="In Rust's notation: no look-around, no backreferences.")
    choice: list[Text] | None = Field(None, min_length=1, max_length=1000)
    grammar: Text | None = Field(None, min_length=1, description="Lark's notation or GBNF.")
    json_object: Flag | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in ("json_", "regex", "choice", "grammar", "json_object") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs must hold exactly one of json, regex, choice, grammar and json_object, not {len(given)}",
                param="structured_outputs",
            )
        return self

    def constraint(self) -> Constraint:
        def named(kind: str, text: str, field: str) -> Constraint:
            return Constraint(kind, text, f"structured_outputs.{field}")

        if self.json_ is not None:
            return named("json_schema", self.json_ if isinstance(self.json_, str) else as_text(self.json_), "json")
        if self.regex is not None:
            return named("regex", self.regex, "regex")
        if self.choice is not None:
            return named("choice", as_text(self.choice), "choice")
        if self.grammar is not None:
            return named("grammar", self.grammar, "grammar")
        return named("json_schema", as_text(ANY_OBJECT), "json_object")


def as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def find_constraint(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> Constraint | None:
    """Raises InvalidRequest where both ask for something."""
    by_format = None if response_format is None else response_format.constraint()
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="structured_outputs")
    return structured_outputs.constraint()
