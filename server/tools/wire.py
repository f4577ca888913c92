"""The wire types of tools and of the calls that conversations bring back."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pagestream.engine import InvalidRequest
from pagestream.server.body import check_structure
from pagestream.server.fields import Flag, Text, WireModel

NAME = r"^[a-zA-Z0-9_.\-]{1,64}$"
MAX_TOOLS = 128


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def check_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments have names."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError("the schema of a function's parameters must be of type object")
    return schema


ObjectSchema = Annotated[dict[str, Any], AfterValidator(check_object)]


class Function(WireModel):
    name: Text = Field(pattern=NAME)
    description: Text | None = None
    parameters: ObjectSchema | None = Field(
        None, description="A JSON Schema of an object; without it the function takes no arguments."
    )
    strict: Flag | None = Field(None, description="Arguments fit the schema also where the model chooses the tool by itself.")

    @property
    def schema_(self) -> dict[str, Any]:
        """Of an object also where the parameters' own leaves open what it is of: whoever reads arguments takes no others."""
        return NO_ARGUMENTS if self.parameters is None else {**self.parameters, "type": "object"}


class Tool(WireModel):
    type: Literal["function"]
    function: Function

    def as_template_input(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(WireModel):
    name: Text


class NamedTool(WireModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(WireModel):
    name: Text
    arguments: Text = Field(description="JSON, as text.")
    parsed_arguments: Any = Field(None, description="The same, as the official client's parse() has read them.")

    def as_template_input(self) -> dict[str, Any]:
        """Templates write arguments as JSON by themselves; what is no JSON object stays the text it is."""
        try:
            check_structure(self.arguments.encode())  # a text within a body, which may be as deep as it likes
            arguments = json.loads(self.arguments)
        except ValueError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(WireModel):
    """A call that the assistant made, as answers hold it and clients send it back."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template_input(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.as_template_input()}


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises InvalidRequest where the fields contradict each other."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools holds two functions of one name", param="tools")
    if choice not in (None, "none", "auto") and not names:
        raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools", param="tool_choice")
