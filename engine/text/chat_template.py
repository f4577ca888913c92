"""Messages to the text that the model was trained to see, by the model's own Jinja template.

Templates come with the model, from strangers: they run in Jinja's sandbox and see plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestream.engine.core.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Put at the end of the last message to find that place again in the rendered text; not a text that anybody writes.
END_MARK = "\u2063<end of the message to continue>\u2063"


class ChatTemplate:
    """A compiled template with the special tokens it may write; None is a model without one.

    Raises StartError if the template is not valid Jinja.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = None if source is None else compile_template(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, with special tokens written out: encode it without adding any.

        messages, tools and template_kwargs hold plain JSON data.  `continue_final_message` leaves the last message open, for
        the model to go on with; it excludes `add_generation_prompt`, which opens a message of the assistant.
        Raises InvalidRequest(param="messages") if the model has no template or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use completions, or start with --chat-template", param="messages")
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        # A key whose value is null means the same as no key, but not to a template that adds texts up.
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            shown[-1] = with_end_mark(shown[-1])
        text = self._render({
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": shown,
            "tools": None if tools is None else list(tools),
            "documents": (template_kwargs or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        })
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest("the messages hold half of a surrogate pair, which is no character", param="messages")
        return cut_at_end_mark(text) if continue_final_message else text

    def _render(self, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        assert self._template is not None
        try:
            return self._template.render(variables)
        except TemplateError as error:
            reason = error.message or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused the messages: {reason[:500]}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template may do anything with the messages, and such errors only say that it expected others.
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"the model's chat template can't use these messages: {reason[:500]}", param="messages") from error


def read_template(path: str | None) -> str | None:
    """The text of a file with a template; None for no file.  Raises StartError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"the chat template {path} can't be read: {reason}") from error


def compile_template(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    try:
        return make_environment().from_string(source)
    except TemplateSyntaxError as error:
        raise StartError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error


def make_environment() -> Environment:
    """The environment that chat templates are written for; the same that transformers gives them."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """{% generation %} marks the assistant's words for training; here it is its content."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this leaves <, > and & as they are: the reader is a model, not a browser."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def with_end_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark and a space after its text: its content, or the last text part of it."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + END_MARK + " "}
    parts = list(content) if isinstance(content, Sequence) else []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], Mapping) and isinstance(parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": parts[index]["text"] + END_MARK + " "}
            return {**message, "content": parts}
    raise InvalidRequest("continue_final_message needs a last message with text", param="messages")


def cut_at_end_mark(text: str) -> str:
    """All before the mark; without trailing spaces if the template trims its messages, as the space after the mark tells."""
    before, mark, after = text.rpartition(END_MARK)
    if not mark:
        raise InvalidRequest("the model's chat template does not show the last message, so it can't be continued", param="messages")
    return before if after.startswith(" ") else before.rstrip()
