"""The wire types of a conversation, and of what chat asks for besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pagestream.engine import InvalidRequest, SamplingParams
from pagestream.server.constraints import find_constraint
from pagestream.server.fields import Count, Flag, MissingField, Several, Text, Whole, WireModel, joined
from pagestream.server.protocol import GUIDED, UNSUPPORTED_GUIDED, GenerationRequest
from pagestream.server.tools.plan import Parsers, ReplyPlan, plan_reply
from pagestream.server.tools.wire import MAX_TOOLS, Tool, ToolCall, ToolChoice, check_tools

UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    **UNSUPPORTED_GUIDED,
}

# What a template gets from fields of their own.
RESERVED_KWARGS = frozenset(("messages", "add_generation_prompt", "continue_final_message", "tools"))


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


class Message(WireModel):
    """One turn.  `developer` is read as `system`; a content of several text parts is joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Several[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(None, description="What the assistant thought; templates may show or leave it out.")
    # What answers hold and clients send back: of no meaning for a text model.
    refusal: Text | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = Field(None, description="The content as the official client's parse() has read it.")

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise MissingField("content")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates expect a message: content is one text, and what isn't there is left out."""
        role = "system" if self.role == "developer" else self.role
        extras = {
            "name": self.name,
            "tool_calls": None if self.tool_calls is None else [call.as_template_input() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return {"role": role, "content": joined(self.content)} | {name: value for name, value in extras.items() if value is not None}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported = UNSUPPORTED_CHAT
    elsewhere = GUIDED | {
        "functions": "tools", "function_call": "tool_choice", "prompt": "/v1/completions", "best_of": "/v1/completions",
        "echo": "/v1/completions", "use_beam_search": "/v1/completions", "input": "/v1/responses",
    }  # fmt: skip
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "smollm2", "messages": [{"role": "user", "content": "Name a fruit."}], "max_tokens": 32}
        }
    )

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: Count | None = Field(None, description="Tokens to generate at most; without it, what the context has room for.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    logprobs: Flag | None = False
    top_logprobs: Whole | None = Field(None, ge=0, le=20, description="Only with logprobs.")
    add_generation_prompt: Flag | None = Field(
        None, description="Whether the prompt ends where the assistant begins; true unless a message is continued."
    )
    continue_final_message: Flag | None = Field(
        False, description="The answer continues the last message, which is the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the model's chat template.")
    add_special_tokens: Flag | None = Field(False, description="Templates mostly write the begin-of-sequence token themselves.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = Field(None, description="Default: auto. required and a named tool constrain the answer.")
    parallel_tool_calls: Flag | None = Field(None, description="Whether one answer may hold several calls; default: true.")
    safety_identifier: Text | None = Field(None, description="Accepted for compatibility, as user is; without effect.")
    prompt_cache_key: Text | None = Field(None, description="The same: common beginnings of prompts are always found.")

    @model_validator(mode="after")
    def check_template_kwargs(self) -> Self:
        for name in self.chat_template_kwargs or ():
            if name in RESERVED_KWARGS:
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name!r}, which has a field of its own", param="chat_template_kwargs"
                )
        return self

    @model_validator(mode="after")
    def check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("continue_final_message contradicts add_generation_prompt", param="continue_final_message")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequest("continue_final_message needs a last message of the assistant's", param="continue_final_message")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        check_tools(self.tools, self.tool_choice)
        return self

    def reply_plan(self, template: str | None, parsers: Parsers, token_id_of: Callable[[str], int | None]) -> ReplyPlan:
        """`token_id_of` knows texts that are one token.  Raises InvalidRequest naming the field."""
        constraint = find_constraint(self.response_format, self.structured_outputs)
        is_parallel = self.parallel_tool_calls is not False
        return plan_reply(self.tools or (), self.tool_choice, is_parallel, constraint, template, parsers, token_id_of)

    def sampling_params(self, plan: ReplyPlan) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.common_params() | {"constraint": plan.constraint}
        if plan.needs_special_tokens:
            params["skip_special_tokens"] = False
        return SamplingParams(**params, max_tokens=max_tokens, logprobs=logprobs)

    def template_arguments(self) -> dict[str, Any]:
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {"add_generation_prompt": adds, "continue_final_message": continues, "template_kwargs": self.chat_template_kwargs}
