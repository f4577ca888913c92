"""The shapes of answers in Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

from pagestream.server.responses import ErrorEnvelope, Shape


class AnthropicError(ErrorEnvelope):
    type: Literal["error"]


class TokenCount(Shape):
    input_tokens: int


class AnthropicUsage(Shape):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicBlock(Shape):
    """`text` has its text, `thinking` its thinking, `tool_use` an id, a name and an input."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
