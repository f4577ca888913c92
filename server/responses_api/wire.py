"""The wire types, and their reading as a chat request.  Fields that ask for what isn't served are refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from pagestream.engine import InvalidRequest
from pagestream.server.body import check
from pagestream.server.constraints import MAX_FORMAT_NAME
from pagestream.server.conversation import ChatRequest
from pagestream.server.fields import Count, Flag, ModelRequest, Real, Several, Text, WireModel, at_most, joined
from pagestream.server.tools.wire import MAX_TOOLS, NAME, ObjectSchema


class ContentPart(WireModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(WireModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Several[ContentPart]
    id: Text | None = None
    status: Text | None = None
    phase: None = None

    def as_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": joined(self.content)}


class ReasoningPart(WireModel):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class Reasoning(WireModel):
    """What the assistant thought, as an answer held it; it belongs to what the assistant says or calls next."""

    type: Literal["reasoning"]
    content: Several[ReasoningPart] | None = None
    summary: Several[ReasoningPart] | None = Field(None, description="Counts where there is no content.")
    encrypted_content: None = None
    id: Text | None = None
    status: Text | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "reasoning_content": joined(self.content or self.summary)}


class FunctionCall(WireModel):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Text | None = None
    # What clients know of it and say nothing in.
    async_: None = Field(None, alias="async")
    caller: None = None
    namespace: None = None

    def as_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": self.call_id, "function": function}]}


class FunctionCallOutput(WireModel):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Several[ContentPart]
    id: Text | None = None
    status: Text | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)}


def item_kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(item_kind),
]


def turns_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """What the assistant thought, said and called one after the other is one turn of a chat: many templates take no two in a row."""
    turns: list[dict[str, Any]] = []
    for item in items:
        turn = item.as_chat()
        last: dict[str, Any] = turns[-1] if turns else {"role": ""}
        is_same = last["role"] == turn["role"] == "assistant"
        if is_same and isinstance(item, FunctionCall):
            last.setdefault("tool_calls", []).extend(turn["tool_calls"])
        elif is_same and isinstance(item, InputMessage) and "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
            last["content"] = turn["content"]
        else:
            turns.append(turn)
    return turns


class FunctionTool(WireModel):
    type: Literal["function"]
    name: Text = Field(pattern=NAME)
    description: Text | None = None
    parameters: ObjectSchema | None = None
    strict: Flag | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunctionTool(WireModel):
    type: Literal["function"]
    name: Text


class TextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = Field(None, max_length=MAX_FORMAT_NAME)
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="Only with type json_schema.")
    strict: Flag | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("text.format has a schema with type json_schema, and only then", param="text.format.schema")
        return self

    def as_chat(self) -> dict[str, Any]:
        named = {"name": self.name, "schema": self.json_schema}
        return {"type": self.type} | ({"json_schema": named} if self.type == "json_schema" else {})


class TextOptions(WireModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


OF_CHAT = dict.fromkeys(ChatRequest.model_fields.keys() - {"max_tokens", "max_completion_tokens"}, "/v1/chat/completions")


class ResponsesRequest(ModelRequest):
    """POST /v1/responses."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        # With which a conversation goes on though nothing is stored: here reasoning is in the answer as it is, and may be sent back.
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),  # nothing is stored: send the conversation itself
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning": ({}, {"effort": "none"}),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    elsewhere: ClassVar[dict[str, str]] = OF_CHAT | {"messages": "input", "response_format": "text.format"}
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2", "input": "Name a fruit.", "max_output_tokens": 32}})

    input: Annotated[Text, Field(min_length=1)] | Annotated[Several[Item], Field(min_length=1)]
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Count | None = Field(None, ge=1, description="Without it, what the context has room for.")
    temperature: Real | None = Field(1.0, ge=0, le=2)
    top_p: Real | None = Field(1.0, ge=0, le=1)
    stream: Flag | None = False
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: Flag | None = True
    metadata: Annotated[dict[str, Text] | None, at_most(16)] = Field(None, max_length=16, description="Comes back with the answer.")
    user: Text | None = Field(None, description="Accepted for compatibility; without effect.")
    safety_identifier: Text | None = Field(None, description="The same.")
    prompt_cache_key: Text | None = Field(None, description="The same: common beginnings of prompts are always found.")

    def as_chat(self) -> ChatRequest:
        """Raises InvalidRequest."""
        turns = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else turns_of(self.input)
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": first + turns,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": None if not self.tools else [tool.as_chat() for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text is None or self.text.format is None else self.text.format.as_chat(),
        }
        return check(ChatRequest, fields)
