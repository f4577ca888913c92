"""A chat answer written as Anthropic's API writes messages, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagestream.server.answer import Piece
from pagestream.server.chat import finish_reason, parts_of
from pagestream.server.errors import ApiError
from pagestream.server.shaped import NamedEvent, ShapedAnswer
from pagestream.server.tools.reply import Part

BLOCK_TYPES = {"content": "text", "reasoning": "thinking", "call": "tool_use"}


def start_of(part: Part) -> dict[str, Any]:
    """The content block that a part begins, still empty."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def delta_of(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "input_json_delta", "partial_json": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


class MessagesAnswer(ShapedAnswer):
    id_prefix = "msg"
    names = {"response_format": "output_config.format"}
    _block: dict[str, Any] | None = None  # the content block that grows, and
    _at = -1  # its place

    def counts(self) -> dict[str, Any]:
        """Anthropic counts the cached part of a prompt apart from the rest."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def stop_of(self, piece: Piece) -> dict[str, Any]:
        """A stop string that ended the answer has a reason and a field of its own."""
        is_stop_string = piece.finish_reason == "stop" and isinstance(piece.stop_reason, str)
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if is_stop_string else reasons[finish_reason(piece, self.reader) or "stop"]
        return {"stop_reason": reason, "stop_sequence": piece.stop_reason if is_stop_string else None}

    def opening(self) -> list[NamedEvent]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        message: dict[str, Any] = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self.counts()}
        return [("message_start", {"message": message})]

    def told(self, piece: Piece) -> Iterator[NamedEvent]:
        for part in parts_of(piece, self.reader):
            if is_new_block(part, self._block):
                yield from self._end_block()
                self._block, self._at = start_of(part), self._at + 1
                yield "content_block_start", {"index": self._at, "content_block": self._block}
            if part.text:
                yield "content_block_delta", {"index": self._at, "delta": delta_of(part)}
        if piece.finish_reason is not None:
            yield from self._end_block()
            yield "message_delta", {"delta": self.stop_of(piece), "usage": self.counts()}
            yield "message_stop", {}

    def _end_block(self) -> Iterator[NamedEvent]:
        if self._block is not None:
            yield "content_block_stop", {"index": self._at}

    def failure(self, error: ApiError) -> NamedEvent:
        return "error", error.anthropic_envelope()

    def fold(self, events: list[NamedEvent]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for name, fields in events:
            match name:
                case "message_start":
                    message = fields["message"]
                case "content_block_start":
                    blocks.append(fields["content_block"])
                    texts.append("")
                case "content_block_delta":
                    texts[-1] += next(text for key, text in fields["delta"].items() if key != "type")
                case "message_delta":
                    message |= {**fields["delta"], "usage": fields["usage"]}
        for block, text in zip(blocks, texts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = as_input(text)
            else:
                block[block["type"]] = text
        return message | {"content": blocks}


def is_new_block(part: Part, block: dict[str, Any] | None) -> bool:
    return block is None or part.call_id is not None or block["type"] != BLOCK_TYPES[part.kind]


def as_input(arguments: str) -> Any:
    """A call that was cut off has no input that can be read: then all of its text, under a name that says so."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"incomplete_json": arguments}
    return value if isinstance(value, dict) else {"value": value}
