"""How model families write calls: the marks around them, and the language of an answer that must be, or may hold, calls.

Hermes and Qwen:  <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>, anywhere in the answer, several one after the other
Llama 3:          {"name": "f", "parameters": {…}} as the whole answer, several with ; between; no mark says that it is a call, so an
                  object whose name is a tool's is one, also where the model only meant to show it
Mistral:          [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …] at the end of the answer, where [TOOL_CALLS] is a special token;
                  newer ones write [TOOL_CALLS]f[ARGS]{…} for each call, some with [CALL_ID] and an id before [ARGS]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.engine import Constraint
from pagestream.server.tools.wire import NamedTool, Tool, ToolChoice

# JSON as the tojson of chat templates spaces it, which is what models have been trained on.
AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CALLS = 16  # in one answer that is forced to call: nothing else would end a model that likes to


@dataclass(frozen=True, slots=True)
class CallSyntax:
    name: str
    opening: str  # begins a call, or a list of them
    closing: str  # of one call
    between: str  # characters that may stand between calls and mean nothing
    arguments_key: str
    separator: str  # of several calls in a forced answer
    is_whole_answer: bool = False  # a call is one at the very start of an answer only
    first: str = ""  # what a forced answer begins with, and
    last: str = ""  # what it ends with
    shows_special_tokens: bool = False  # the opening is a special token, which texts usually leave out
    names_first: bool = False  # an opening may be followed by a name and bare arguments, too
    opening_token_id: int | None = None  # where the vocabulary has the opening as one token
    id_length: int = 24  # of a call's id

    def call_rule(self, number: int, tool: Tool) -> str:
        # In the pieces that JSON has: as one long text, its beginning would win over an object of other keys; see `or_reply`.
        pieces = [self.opening_text + "{", '"name"', ": ", json.dumps(tool.function.name), ", ", f'"{self.arguments_key}"', ": "]
        tail = "}" + self.closing_text
        return (
            f"call_{number}: {' '.join(map(json.dumps, pieces))} args_{number} {json.dumps(tail)}\n"
            f"args_{number}: %json {json.dumps({**tool.function.schema_, 'x-guidance': AS_TEMPLATES_WRITE})}\n"
        )

    @property
    def opening_text(self) -> str:
        return self.opening + "\n" if self.closing else ""

    @property
    def closing_text(self) -> str:
        return "\n" + self.closing if self.closing else ""

    def written(self, calls: Sequence[dict[str, Any]]) -> str:
        """Calls, as templates take them, in the words of a model that makes them."""
        called = [json.dumps({"name": call["name"], self.arguments_key: call["arguments"]}, ensure_ascii=False) for call in calls]
        opening = self.opening if self.first else ""
        return opening + self.first + self.separator.join(self.opening_text + call + self.closing_text for call in called) + self.last

    def forced(self, tools: Sequence[Tool], is_parallel: bool) -> Constraint:
        """The language of answers that are calls of these tools and nothing else."""
        return Constraint("lark", f"start: calls\n{self.calls_rule(is_parallel)}{self.call_rules(tools)}", "tools")

    def strict(self, tools: Sequence[Tool], is_parallel: bool) -> Constraint:
        """The language of answers that may be any text, but in which every call fits its tool."""
        rules = self.call_rules(tools)
        if self.is_whole_answer:
            rules += self.calls_rule(is_parallel)
            return Constraint("lark", f"start: TEXT | calls\nTEXT: /([^{{](.|\\n)*)?/\n{rules}", "tools")
        # The text before a call ends with its opening, at the first one there is; from there on only a call will do.
        before = f"before[lazy]: /(.|\\n)*/ {json.dumps(self.opening)}"
        if self.opening_token_id is not None:
            before = f"before: TEXT {self.opening_rule}"  # no text holds a special token
        if self.first:
            start, rules = "TEXT | before calls", rules + self.calls_rule(is_parallel)
        else:
            start, rules = "(before call)* TEXT" if is_parallel else "TEXT | before call", rules.replace(f': "{self.opening}', ': "')
        return Constraint("lark", f"start: {start}\n{before}\nTEXT: /(.|\\n)*/\n{rules}", "tools")

    def or_reply(self, schema: dict[str, Any], tools: Sequence[Tool], is_parallel: bool) -> Constraint:
        """The language of answers that are calls of these tools or else JSON of this schema."""
        opening = f"{self.opening_rule} " if self.first else ""
        reply = f"reply: %json {json.dumps({**schema, 'x-guidance': AS_TEMPLATES_WRITE})}\n"
        rules = reply + self.calls_rule(is_parallel) + self.call_rules(tools)
        return Constraint("lark", f"start: reply | {opening}calls\n{rules}", "response_format")

    @property
    def opening_rule(self) -> str:
        return json.dumps(self.opening) if self.opening_token_id is None else f"<[{self.opening_token_id}]>"

    def calls_rule(self, is_parallel: bool) -> str:
        more = f" ({json.dumps(self.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
        first, last = (json.dumps(text) if text else "" for text in (self.first, self.last))
        return f"calls: {first} call{more} {last}\n"

    def call_rules(self, tools: Sequence[Tool]) -> str:
        rules = "".join(self.call_rule(number, tool) for number, tool in enumerate(tools))
        return "call: " + " | ".join(f"call_{number}" for number in range(len(tools))) + "\n" + rules


HERMES = CallSyntax("hermes", "<tool_call>", "</tool_call>", " \n", "arguments", "\n")
LLAMA3 = CallSyntax("llama3", "{", "", " \n;", "parameters", ";", is_whole_answer=True)
MISTRAL = CallSyntax(
    "mistral", "[TOOL_CALLS]", "", " \n,[]", "arguments", ", ", first="[", last="]", shows_special_tokens=True, names_first=True,
    id_length=9,
)  # fmt: skip
SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3, MISTRAL)}


def find_syntax(chosen: str, template: str | None) -> CallSyntax:
    """The one asked for, or the one that the model's chat template writes; Hermes' where that shows none."""
    if chosen != "auto":
        return SYNTAXES[chosen]
    template = template or ""
    if HERMES.opening not in template:
        if MISTRAL.opening in template:
            return MISTRAL
        if "<|python_tag|>" in template or '"parameters": ' in template:
            return LLAMA3
    return HERMES


def find_tool_constraint(
    syntax: CallSyntax, tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool, schema: dict[str, Any] | None
) -> Constraint | None:
    """What the choice demands of the answer; None where the model is free.  `schema` is of an answer that calls nothing."""
    if isinstance(choice, NamedTool):
        return syntax.forced([tool for tool in tools if tool.function.name == choice.function.name], False)
    if choice == "required":
        return syntax.forced(tools, is_parallel)
    if schema is not None:
        return syntax.or_reply(schema, tools, is_parallel)
    if any(tool.function.strict for tool in tools) or not is_parallel:
        return syntax.strict(tools, is_parallel)
    return None


def instructions(syntax: CallSyntax, tools: Sequence[Tool]) -> str:
    """For a model whose template does not show tools: what there is, and how to call it."""
    listed = "\n".join(json.dumps(tool.as_template_input(), ensure_ascii=False) for tool in tools)
    example = f'{syntax.opening_text}{syntax.first}{{"name": <name>, "{syntax.arguments_key}": <arguments>}}{syntax.last}'
    return (
        "You can call these functions; each is described by a JSON schema:\n"
        f"{listed}\nTo call one, write only:\n{example}{syntax.closing_text}"
    )
