"""A chat answer written as Anthropic's API writes messages, whole and as events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from pagestream.engine import EngineError
from pagestream.server.answer import Piece, encode, fold_pieces
from pagestream.server.chat import ShapedAnswer, finish_reason
from pagestream.server.errors import as_api_error
from pagestream.server.tools.reply import Part, ReplyReader

log = logging.getLogger(__name__)

BLOCK_TYPES = {"content": "text", "reasoning": "thinking", "call": "tool_use"}


def event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}).encode("ascii") + b"\n\n"


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

    def message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": usage}

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

    def stop_of(self, piece: Piece, reader: ReplyReader | None) -> dict[str, Any]:
        """A stop string that ended the answer has a reason and a field of its own."""
        is_stop_string = piece.finish_reason == "stop" and isinstance(piece.stop_reason, str)
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if is_stop_string else reasons[finish_reason(piece, reader) or "stop"]
        return {"stop_reason": reason, "stop_sequence": piece.stop_reason if is_stop_string else None}

    async def whole(self) -> dict[str, Any]:
        found: list[Piece] = []
        try:
            async for pieces in self.pieces():
                found += pieces
        finally:
            self.abort()
        piece, reader = fold_pieces(found), self._make_reader()
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for part in self.parts(piece, reader):
            if is_new_block(part, blocks[-1] if blocks else None):
                blocks.append(start_of(part))
                texts.append("")
            texts[-1] += part.text
        for block, text in zip(blocks, texts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = as_input(text)
            else:
                block[block["type"]] = text
        return self.message(blocks, self.stop_of(piece, reader), self.counts())

    async def events(self) -> AsyncIterator[bytes]:
        """The whole stream.  A failure becomes an event `error`; the message then has no end."""
        reader, block, num_blocks = self._make_reader(), None, 0
        yield event("message_start", message=self.message([], {"stop_reason": None, "stop_sequence": None}, self.counts()))
        try:
            async for pieces in self.pieces():
                written = b""
                for piece in pieces:
                    for part in self.parts(piece, reader):
                        if is_new_block(part, block):
                            written += b"" if block is None else event("content_block_stop", index=num_blocks - 1)
                            block, num_blocks = start_of(part), num_blocks + 1
                            written += event("content_block_start", index=num_blocks - 1, content_block=block)
                        if part.text:
                            written += event("content_block_delta", index=num_blocks - 1, delta=delta_of(part))
                    if piece.finish_reason is not None:
                        written += b"" if block is None else event("content_block_stop", index=num_blocks - 1)
                        written += event("message_delta", delta=self.stop_of(piece, reader), usage=self.counts())
                if written:
                    yield written
            yield event("message_stop")
        except Exception as error:
            self.abort()
            log.error("%s failed in its stream: %s", self.id, error, exc_info=not isinstance(error, EngineError))
            yield event("error", **as_api_error(error).anthropic_envelope())


def is_new_block(part: Part, block: dict[str, Any] | None) -> bool:
    return block is None or part.call_id is not None or block["type"] != BLOCK_TYPES[part.kind]


def as_input(arguments: str) -> Any:
    """A call that was cut off has no input that can be read: then all of its text, under a name that says so."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"incomplete_json": arguments}
    return value if isinstance(value, dict) else {"value": value}
