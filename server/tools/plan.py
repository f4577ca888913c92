"""What a chat request's tools and the model's template together make of an answer: the prompt, the constraint, the readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagestream.engine import Constraint, InvalidRequest
from pagestream.server.body import check_structure
from pagestream.server.tools.reasoning_count import ReasoningCounter
from pagestream.server.tools.reply import THINK, CallReader, ReasoningReader, ReplyReader
from pagestream.server.tools.syntax import CallSyntax, find_syntax, find_tool_constraint, instructions
from pagestream.server.tools.wire import NamedTool, Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class Parsers:
    """What the operator chose, or `auto`: by the model's chat template."""

    tool_calls: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """`tools` are those that may be called: none where there are none, or where tool_choice says so."""

    syntax: CallSyntax
    tools: tuple[Tool, ...]
    constraint: Constraint | None
    is_forced: bool  # the answer is calls and nothing else
    may_reason: bool
    template_shows_tools: bool
    template_shows_calls: bool

    @property
    def needs_special_tokens(self) -> bool:
        return bool(self.tools) and self.syntax.shows_special_tokens and not self.is_forced

    def prompt_arguments(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """`messages` and, where the template shows them itself, `tools`; else a first message describes them."""
        shown = list(messages) if self.template_shows_calls else [self.with_calls_in_text(message) for message in messages]
        if not self.tools:
            return {"messages": shown}
        if self.template_shows_tools:
            return {"messages": shown, "tools": [tool.as_template_input() for tool in self.tools]}
        told = instructions(self.syntax, self.tools)
        first, *rest = shown
        if first["role"] == "system":
            return {"messages": [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]}
        return {"messages": [{"role": "system", "content": told}, *shown]}

    def with_calls_in_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """For a template that would leave its calls out: the model saw itself call nothing, and results of nothing."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        return {**message, "content": message["content"] + self.syntax.written([call["function"] for call in calls])}

    def reader(self, prompt: str) -> ReplyReader:
        """For one answer to this prompt."""
        reasoning = ReasoningReader(starts_inside=prompt.rstrip().endswith(THINK)) if self.may_reason else None
        names = frozenset(tool.function.name for tool in self.tools)
        calls = CallReader(self.syntax, names, starts_inside=self.is_forced and bool(self.syntax.first)) if names else None
        return ReplyReader(reasoning, calls)

    def reasoning_counter(self, prompt: str, decode: Callable[[Sequence[int]], str]) -> ReasoningCounter | None:
        """For one answer to this prompt; None where it can't hold any reasoning.  `decode` shows special tokens."""
        return ReasoningCounter(decode, starts_inside=prompt.rstrip().endswith(THINK)) if self.may_reason else None


RESULT_ROLES = ("tool", "function")


def shows_results(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template has a place for what tools gave back: many leave out, or refuse, each role that they don't know."""
    turns = [("user", "a question"), ("assistant", "a call"), ("tool", "a result")]
    try:
        return "a result" in render([{"role": role, "content": content} for role, content in turns])
    except InvalidRequest:
        return False


def results_as_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as the user's words, and all of them and what the user says next in one turn, since such templates take no two in a row."""
    shown: list[dict[str, Any]] = []
    is_open = False  # the last turn has a result at its end
    for message in messages:
        is_result = message["role"] in RESULT_ROLES
        content = f"<tool_response>\n{message['content']}\n</tool_response>" if is_result else message["content"]
        if is_open and (is_result or message["role"] == "user"):
            shown[-1]["content"] += f"\n{content}"
        else:
            shown.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result
    return shown


def plan_reply(
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    is_parallel: bool,
    constraint: Constraint | None,
    template: str | None,
    parsers: Parsers,
    token_id_of: Callable[[str], int | None],
) -> ReplyPlan:
    """`constraint` is what else the request asks of the answer; `token_id_of` knows texts that are one token.

    With tools that may be called, an answer is calls or else what a response_format asks for.  Raises InvalidRequest where a
    constraint of another kind leaves no room for calls, or holds no JSON Schema.
    """
    syntax = find_syntax(parsers.tool_calls, template)
    callable_tools = tuple(tools) if choice != "none" else ()
    if callable_tools and constraint is not None and constraint.kind != "json_schema":
        raise InvalidRequest(f"{constraint.param} leaves no room for tool calls; give tool_choice none", param=constraint.param)
    if callable_tools:
        if syntax.shows_special_tokens:
            syntax = replace(syntax, opening_token_id=token_id_of(syntax.opening))
        schema = None if constraint is None else schema_of(constraint)
        constraint = find_tool_constraint(syntax, callable_tools, choice, is_parallel, schema)
    may_reason = parsers.reasoning == "think" or (parsers.reasoning == "auto" and THINK in (template or ""))
    return ReplyPlan(
        syntax=syntax,
        tools=callable_tools,
        constraint=constraint,
        is_forced=bool(callable_tools) and (choice == "required" or isinstance(choice, NamedTool)),
        may_reason=may_reason and constraint is None,
        template_shows_tools="tools" in (template or ""),
        template_shows_calls="tool_calls" in (template or ""),
    )


def schema_of(constraint: Constraint) -> dict[str, Any]:
    """Of a constraint of the kind json_schema, whose text may be a client's own.  Raises InvalidRequest."""
    try:
        check_structure(constraint.text.encode())
        schema = json.loads(constraint.text)
    except ValueError:
        schema = None
    if schema is True:  # which any JSON fits
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{constraint.param} holds no JSON Schema", param=constraint.param, code="invalid_constraint")
    return schema
