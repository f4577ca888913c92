"""One call's JSON object as it comes, character by character: its name, and its arguments' own text."""

from __future__ import annotations

import json

NAME_KEY = "name"
ARGUMENTS_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"


class CallScanner:
    """Reads {"name": "f", "arguments": {…}} in any order of its keys; other keys are passed over.

    `arguments` is the text of that value as it was written, however far it has come.  Invariant: depth counts the brackets that are
    open outside of strings; at depth 1 a comma ends a value, and a colon a key.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None  # whose value is being read
        self._text = ""  # of the key or of the value, so far
        self._is_bare = False

    @classmethod
    def of_arguments(cls, name: str) -> CallScanner:
        """Reads the arguments alone, {…}, of a call whose name has been read."""
        scanner = cls()
        scanner.name, scanner._key, scanner._depth, scanner._is_bare = name, ARGUMENTS_KEYS[0], 1, True
        return scanner

    def push(self, character: str) -> None:
        """One more character; nothing may come after the end."""
        assert not self.is_done, "text after the end of a call"
        if self._in_string:
            self._text += character
            self._keep(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif self._depth == 0:
            self._open(character)
        elif self._depth == 1 and character in ",}":
            self._end_value(is_last=character == "}")
        elif self._depth == 1 and self._key is None:
            self._read_key(character)
        else:
            self._read_value(character)

    def _open(self, character: str) -> None:
        if character == "{":
            self._depth = 1
        elif character not in SPACE:
            self.is_broken = True

    def _read_key(self, character: str) -> None:
        if character == ":":
            key = parsed_string(self._text)
            self._key, self._text = key, ""
            self.is_broken = key is None
        elif character == '"':
            self._in_string = True
            self._text += character
        elif character not in SPACE:
            self.is_broken = True

    def _read_value(self, character: str) -> None:
        if character in SPACE and not self._text:
            return
        self._text += character
        self._keep(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_done = self._is_bare and self._depth == 1

    def _keep(self, character: str) -> None:
        if self._key in ARGUMENTS_KEYS:
            self.arguments += character

    def _end_value(self, *, is_last: bool) -> None:
        if self._key is None:
            self.is_broken = bool(self._text) or not is_last or self.name is None
        elif self._key == NAME_KEY:
            self.name = parsed_string(self._text)
            self.is_broken = self.name is None
        elif self._key in ARGUMENTS_KEYS:
            self.arguments = self.arguments.rstrip(SPACE)
        self._key, self._text = None, ""
        if is_last:
            self._depth = 0
            self.is_done = self.name is not None
            self.is_broken = self.is_broken or not self.is_done


def parsed_string(text: str) -> str | None:
    """None for what is no JSON string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
