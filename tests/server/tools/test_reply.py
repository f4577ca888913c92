"""Answers taken apart: the same parts whatever pieces the text comes in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.server.tools.reply import CallReader, ReasoningReader, ReplyReader, as_delta, as_message
from pagestream.server.tools.syntax import HERMES, LLAMA3, MISTRAL, CallSyntax, find_syntax

NO_REASONING, OUTSIDE, INSIDE = "none", "outside", "inside"

CASES: list[tuple[CallSyntax, str, str, dict[str, Any]]] = [
    (
        HERMES,
        NO_REASONING,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<tool_call>", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {} , "name": "g"}</tool_call>',
        {"content": "Sure.\n", "calls": [("f", '{"a": "}\\"<tool_call>", "b": [1, {"c": 2}]}'), ("g", "{}")]},
    ),
    (HERMES, NO_REASONING, "Sure <tool_cal and <tool_call>no</tool_call>", {"content": "Sure <tool_cal and <tool_call>no</tool_call>"}),
    (HERMES, NO_REASONING, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', {
        "content": '<tool_call>{"name": "h", "arguments": {}}</tool_call>'}),
    (HERMES, NO_REASONING, '<tool_call>{"name": "f"}</tool_call>', {"content": None, "calls": [("f", "{}")]}),
    (HERMES, NO_REASONING, '<tool_call>{"name": "f", "arguments": {"a": 1', {"content": None, "calls": [("f", '{"a": 1')]}),
    (HERMES, NO_REASONING, 'So <tool_call>\n{"name": ', {"content": 'So <tool_call>\n{"name": '}),
    (HERMES, NO_REASONING, '<tool_call>{"f": 1}</tool_call>', {"content": '<tool_call>{"f": 1}</tool_call>'}),
    (
        LLAMA3,
        NO_REASONING,
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        {"content": None, "calls": [("f", '{"a": 1}'), ("g", "{}")]},
    ),
    (LLAMA3, NO_REASONING, 'Hello {"name": "f"}', {"content": 'Hello {"name": "f"}'}),
    (LLAMA3, NO_REASONING, '{"x": 1}', {"content": '{"x": 1}'}),
    (
        MISTRAL,
        NO_REASONING,
        'So[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        {"content": "So", "calls": [("f", '{"a": 1}'), ("g", "{}")]},
    ),
    (
        MISTRAL,
        NO_REASONING,
        'So[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS] g[CALL_ID]abc123[ARGS] {}',
        {"content": "So", "calls": [("f", '{"a": {"b": "}"}}'), ("g", "{}")]},
    ),
    (MISTRAL, NO_REASONING, '[TOOL_CALLS]f{"a": 1}', {"content": None, "calls": [("f", '{"a": 1}')]}),
    (MISTRAL, NO_REASONING, '[TOOL_CALLS]f[ARGS]{"a": [1', {"content": None, "calls": [("f", '{"a": [1')]}),
    (MISTRAL, NO_REASONING, '[TOOL_CALLS]h[ARGS]{"a": 1}', {"content": '[TOOL_CALLS]h[ARGS]{"a": 1}'}),
    (MISTRAL, NO_REASONING, "[TOOL_CALLS]f [not] {}", {"content": "[TOOL_CALLS]f [not] {}"}),
    (MISTRAL, NO_REASONING, "So[TOOL_CALLS]f[ARGS]", {"content": "So[TOOL_CALLS]f[ARGS]"}),
    (MISTRAL, NO_REASONING, "[TOOL_CALLS]" + "f" * 200, {"content": "[TOOL_CALLS]" + "f" * 200}),
    (
        MISTRAL,
        NO_REASONING,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}][TOOL_CALLS][{"name": "g", "arguments": {}}]',
        {"content": None, "calls": [("f", '{"a": 1}'), ("g", "{}")]},
    ),
    (HERMES, OUTSIDE, "<think>\nhm <tool_call>\n</think>\n\nfine", {"reasoning": "hm <tool_call>", "content": "fine"}),
    (HERMES, OUTSIDE, "no thought </think>", {"content": "no thought </think>"}),
    (HERMES, OUTSIDE, "  <thin", {"content": "  <thin"}),
    (HERMES, INSIDE, "still\n\nthinking\n", {"reasoning": "still\n\nthinking", "content": ""}),
    (
        HERMES,
        INSIDE,
        'hm\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        {"reasoning": "hm", "content": None, "calls": [("f", '{"a": 1}')]},
    ),
]


def read(syntax: CallSyntax, reasoning: str, pieces: list[str]) -> ReplyReader:
    think = None if reasoning == NO_REASONING else ReasoningReader(starts_inside=reasoning == INSIDE)
    return ReplyReader(think, CallReader(syntax, {"f", "g"}))


def told(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    found = {"content": message["content"], "reasoning": message.get("reasoning_content"), "calls": calls}
    return {name: value for name, value in found.items() if value or name == "content"}


@pytest.mark.parametrize(("syntax", "reasoning", "text", "want"), CASES)
@settings(deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_pieces(syntax, reasoning, text, want, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = read(syntax, reasoning, pieces)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert told(as_message(parts)) == want
    assert reader.has_calls == ("calls" in want)


def test_nothing_is_held_longer_than_needed():
    reader = ReplyReader(None, CallReader(HERMES, {"f"}))
    assert [part.text for part in reader.push("Hello <")] == ["Hello "]
    assert [part.text for part in reader.push("b>")] == ["<b>"]
    assert reader.push('<tool_call>{"name": "f"') == []
    begun = reader.push(', "arguments": {"a": ')
    assert [as_delta(part)["tool_calls"][0]["function"] for part in begun] == [
        {"name": "f", "arguments": ""},
        {"arguments": '{"a":'},
    ]
    assert [part.text for part in reader.push("12")] == [" 12"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("plain", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_syntax_is_the_templates(template, name):
    assert find_syntax("auto", template).name == name
    assert find_syntax("mistral", template) is MISTRAL
