"""The wire types, and their reading as a chat request.  Fields that ask for what isn't served are refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pagestream.engine import InvalidRequest
from pagestream.server.body import check
from pagestream.server.conversation import ChatRequest
from pagestream.server.fields import Count, Flag, Real, Several, Text, Whole, WireModel, joined
from pagestream.server.tools.wire import MAX_TOOLS, NAME, ObjectSchema


class Block(WireModel):
    cache_control: dict[str, Any] | None = Field(None, description="Without effect: common beginnings are always cached.")


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(WireModel):
    """What the assistant thought, as an answer held it."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Several[TextBlock] | None = None
    is_error: Flag | None = None


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(WireModel):
    role: Literal["user", "assistant"]
    content: Text | Several[ContentBlock]

    def as_chat(self) -> list[dict[str, Any]]:
        """One or more messages of a chat: results of tools are turns of their own there."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = self.content
        turns: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}
            for block in blocks
            if isinstance(block, ToolResultBlock)
        ]
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        if texts or calls or not turns:
            turn: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
            turn |= {"tool_calls": calls} if calls else {}
            turns.append(turn | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}))
        return turns


class MessagesTool(Block):
    type: Literal["custom"] | None = None
    name: Text = Field(pattern=NAME)
    description: Text | None = None
    input_schema: ObjectSchema = Field(description="A JSON Schema of an object.")
    strict: Flag | None = Field(None, description="The input fits the schema also where the model chooses the tool by itself.")

    def as_chat(self) -> dict[str, Any]:
        told = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {name: value for name, value in told.items() if value is not None}}


class MessagesToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, description="Only with type tool.")
    disable_parallel_tool_use: Flag | None = False

    @model_validator(mode="after")
    def check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("tool_choice has a name with type tool, and only then", param="tool_choice.name")
        return self

    def as_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Metadata(WireModel):
    user_id: Text | None = Field(None, description="Accepted for compatibility; without effect.")


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="A JSON Schema, which the answer fits.")


class OutputConfig(WireModel):
    format: OutputFormat | None = None
    effort: Literal["high"] | None = Field(None, description="Accepted for compatibility, as the default; without effect.")


class Conversation(Block):
    """What a message is asked for with, and its tokens are counted of."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thinking": ({"type": "disabled"},),
        "user_profile_id": (),
        "workspace_id": (),
    }
    elsewhere: ClassVar[dict[str, str]] = {"output_format": "output_config.format"}

    model: Text = Field(description="A name that GET /v1/models lists.")
    messages: list[Turn] = Field(min_length=1, max_length=4096)
    system: Text | Several[TextBlock] | None = None
    tools: list[MessagesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = Field(None, description="Its format is what the answer is constrained to.")

    def as_chat(self) -> ChatRequest:
        """Raises InvalidRequest."""
        return check(ChatRequest, self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        """Raises InvalidRequest."""
        system = [{"role": "system", "content": joined(self.system)}] if self.system else []
        continues = self.messages[-1].role == "assistant"
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *(message for turn in self.messages for message in turn.as_chat())],
            "continue_final_message": continues,
        }
        if self.output_config is not None and self.output_config.format is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.output_config.format.json_schema}}
        if self.tools:
            choice = self.tool_choice
            fields["tools"] = [tool.as_chat() for tool in self.tools]
            fields["tool_choice"] = None if choice is None else choice.as_chat()
            fields["parallel_tool_calls"] = not (choice is not None and choice.disable_parallel_tool_use)
        elif self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
        return fields


class CountTokensRequest(Conversation):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2", "messages": [{"role": "user", "content": "Name a fruit."}]}}
    )


class MessagesRequest(Conversation):
    """POST /v1/messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "smollm2", "max_tokens": 32, "messages": [{"role": "user", "content": "Name a fruit."}]}
        }
    )

    max_tokens: Count = Field(description="Tokens to generate at most; 0 computes the prompt alone, which is then in the cache.")
    stop_sequences: list[Text] | None = Field(None, max_length=16)
    stream: Flag | None = False
    temperature: Real | None = Field(1.0, ge=0, le=1)
    top_p: Real | None = Field(1.0, ge=0, le=1)
    top_k: Whole | None = Field(0, ge=0, le=2**31 - 1)
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def check_stops(self) -> Self:
        if any(not text for text in self.stop_sequences or ()):
            raise InvalidRequest("stop_sequences must hold non-empty strings", param="stop_sequences")
        return self

    def chat_fields(self) -> dict[str, Any]:
        return super().chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
