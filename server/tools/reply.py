"""An answer's text taken apart as it comes: reasoning, content, calls.  The same whatever pieces the text comes in."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pagestream.server.tools.scanner import CallScanner
from pagestream.server.tools.syntax import CallSyntax

THINK, END_THINK = "<think>", "</think>"
ID_ALPHABET = string.ascii_letters + string.digits
# Of a call whose name stands before its arguments.
NAME_CHARACTERS = frozenset(ID_ALPHABET + "_.-")
NAMED_HEAD = re.compile(r"(?P<name>[a-zA-Z0-9_.\-]+)\s*(\[CALL_ID\]\s*\w+\s*)?(\[ARGS\])?\s*")
MAX_HEAD = 160


@dataclass(frozen=True, slots=True)
class Part:
    """Some text of one kind.  A call is announced by a part with its id and name, and an empty text."""

    kind: str  # reasoning | content | call
    text: str = ""
    call_index: int = 0
    call_id: str | None = None
    name: str | None = None


def held_back(text: str, mark: str) -> int:
    """The length of the longest end of the text that begins the mark, which may still be coming."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


class ReasoningReader:
    """<think> reasoning </think> answer.  Line breaks around the marks belong to neither."""

    def __init__(self, *, starts_inside: bool):
        self._is_inside = starts_inside
        self._may_begin = not starts_inside  # only at the very start of an answer
        self._trims = True
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        if self._may_begin:
            stripped = text.lstrip()
            if len(stripped) < len(THINK) and THINK.startswith(stripped):
                self._held = text
                return parts
            self._may_begin = False
            if stripped.startswith(THINK):
                self._is_inside, text = True, stripped[len(THINK) :]
            else:
                self._trims = False
        if self._is_inside:
            reasoning, mark, after = text.partition(END_THINK)
            if not mark:
                # Also the line breaks that may stand before the mark.
                body = reasoning[: len(reasoning) - held_back(reasoning, END_THINK)].rstrip("\n")
                self._held = reasoning[len(body) :]
                return self._trimmed("reasoning", body)
            parts += self._trimmed("reasoning", reasoning.rstrip("\n"))
            self._is_inside, self._trims, text = False, True, after
        return parts + self._trimmed("content", text)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        kind = "reasoning" if self._is_inside else "content"
        return [Part(kind, held)] if held.strip("\n") or (held and not self._is_inside) else []

    def _trimmed(self, kind: str, text: str) -> list[Part]:
        if self._trims:
            text = text.lstrip("\n")
        if not text:
            return []
        self._trims = False
        return [Part(kind, text)]


class CallReader:
    """Content with calls in it.  What begins like a call and is none, or calls what isn't there, stays content.

    Three states: in content, between calls, in a call.  `_raw` is the text since an opening, until a call of it is announced.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, starts_inside: bool = False):
        self._syntax = syntax
        self._names = names
        self._is_between = starts_inside
        self._is_opened = starts_inside  # the opening of the next call has been read
        self._is_at_start = True
        self._held = ""
        self._raw = ""
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._num_sent: int | None = None  # characters of the call's arguments; None before its announcement

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest, self._held = self._held + text, ""
        while rest:
            if self._scanner is not None:
                rest = self._scan(self._scanner, rest, parts)
            elif self._is_between:
                rest = self._skip(rest, parts)
            else:
                rest = self._search(rest, parts)
        return parts

    def finish(self) -> list[Part]:
        is_open = self._scanner is None or self._num_sent is None
        lost = self._raw + self._held if is_open and (self._is_opened or not self._is_between) else ""
        self._raw = self._held = ""
        return [Part("content", lost)] if lost else []

    def _search(self, text: str, parts: list[Part]) -> str:
        """Content up to an opening; returns what comes after, and holds back what may become one."""
        mark = self._syntax.opening
        if self._syntax.is_whole_answer:
            stripped = text.lstrip()
            if self._is_at_start and not stripped:
                self._held = text
                return ""
            if self._is_at_start and stripped.startswith(mark):
                self._raw, self._is_between, self._is_opened = text[: len(text) - len(stripped)], True, True
                return stripped
            self._is_at_start = False
            parts.append(Part("content", text))
            return ""
        before, found, after = text.partition(mark)
        if not found:
            num_held = held_back(text, mark)
            before, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if before:
            parts.append(Part("content", before))
        if found:
            self._raw, self._is_between, self._is_opened = mark, True, True
        return after

    def _skip(self, text: str, parts: list[Part]) -> str:
        """Past what may stand between calls, up to the next one; anything else is content again."""
        syntax = self._syntax
        rest = self._past_between(text)
        if self._is_opened:
            self._raw += text[: len(text) - len(rest)]
        if syntax.names_first and self._is_opened and rest[:1] in NAME_CHARACTERS:
            return self._read_head(rest, parts)
        if rest.startswith("{") and (self._is_opened or not syntax.closing):
            self._scanner, self._num_sent = CallScanner(), None
            return rest
        marks = [mark for mark in (syntax.closing, "" if syntax.is_whole_answer else syntax.opening) if mark]
        for mark in marks:
            if rest.startswith(mark) and not self._is_opened:
                if mark == syntax.opening:
                    self._raw, self._is_opened = mark, True
                return rest[len(mark) :]
            if rest and mark.startswith(rest):
                self._held = rest
                return ""
        if rest:
            self._give_back(parts)
        return rest

    def _past_between(self, text: str) -> str:
        """An opening may begin with a character that means nothing between calls, and means something all the same."""
        opening, between = self._syntax.opening, self._syntax.between
        while text and text[0] in between and not opening.startswith(text[: len(opening)]):
            text = text[1:]
        return text

    def _read_head(self, text: str, parts: list[Part]) -> str:
        """The name of a call whose arguments follow it, and the marks between the two."""
        head, brace, _ = text.partition("{")
        found = NAMED_HEAD.fullmatch(head)
        if not brace and len(head) <= MAX_HEAD:
            self._held = text  # more of it may be coming
            return ""
        if not brace or found is None or found["name"] not in self._names:
            self._give_back(parts)
            return text
        self._raw += head
        self._scanner, self._num_sent = CallScanner.of_arguments(found["name"]), None
        return text[len(head) :]

    def _scan(self, scanner: CallScanner, text: str, parts: list[Part]) -> str:
        for at, character in enumerate(text, 1):
            scanner.push(character)
            self._raw += character
            is_stranger = scanner.name is not None and scanner.name not in self._names
            if is_stranger or (scanner.is_broken and self._num_sent is None):
                self._give_back(parts)
                return text[at:]
            if scanner.is_done or scanner.is_broken:
                self._send(scanner, parts)
                self._scanner, self._is_opened, self._raw = None, False, ""
                return text[at:]
        self._send(scanner, parts)
        return ""

    def _give_back(self, parts: list[Part]) -> None:
        """It was no call."""
        if self._raw:
            parts.append(Part("content", self._raw))
        self._scanner, self._raw = None, ""
        self._is_between = self._is_opened = self._is_at_start = False

    def _send(self, scanner: CallScanner, parts: list[Part]) -> None:
        if scanner.name is None:
            return
        if self._num_sent is None:
            call_id = new_call_id(self._syntax.id_length)
            parts.append(Part("call", "", self._num_calls, call_id, scanner.name))
            self._num_sent = 0
            self._num_calls += 1
        arguments = scanner.arguments.rstrip()  # space after the value is not its own, and inside it more will follow
        if scanner.is_done and not arguments:
            arguments = "{}"
        if len(arguments) > self._num_sent:
            parts.append(Part("call", arguments[self._num_sent :], self._num_calls - 1))
            self._num_sent = len(arguments)


def new_call_id(length: int) -> str:
    """Some templates accept no other ids than those of their own length, letters and digits only."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(length))


class ReplyReader:
    """One answer's text to its parts: what follows the reasoning, if there is any, is searched for calls, if there may be any."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None):
        self._reasoning = reasoning
        self._calls = calls
        self.has_calls = False

    def push(self, text: str) -> list[Part]:
        parts = [Part("content", text)] if self._reasoning is None else self._reasoning.push(text)
        return self._joined(self._with_calls(parts))

    def finish(self) -> list[Part]:
        parts = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return self._joined(parts + ([] if self._calls is None else self._calls.finish()))

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        return [new for part in parts for new in (self._calls.push(part.text) if part.kind == "content" else [part])]

    def _joined(self, parts: list[Part]) -> list[Part]:
        self.has_calls = self.has_calls or any(part.kind == "call" for part in parts)
        return [part for part in parts if part.text or part.call_id is not None]


def as_message(parts: list[Part]) -> dict[str, Any]:
    """The parts of a whole answer as the assistant's message."""
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    calls: list[dict[str, Any]] = []
    for part in (part for part in parts if part.kind == "call"):
        if part.call_id is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.call_index]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = texts["content"].strip() and texts["content"] or None
    return message


def as_delta(part: Part) -> dict[str, Any]:
    """One part as a chunk's delta."""
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.call_id is None:
        return {"tool_calls": [{"index": part.call_index, "function": {"arguments": part.text}}]}
    function = {"name": part.name, "arguments": part.text}
    return {"tool_calls": [{"index": part.call_index, "id": part.call_id, "type": "function", "function": function}]}
