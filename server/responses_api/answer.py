"""A chat answer written as a response: items of output, whole and as events of their own types."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from pagestream.server.answer import Piece
from pagestream.server.chat import parts_of
from pagestream.server.errors import ApiError
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.shaped import NamedEvent, ShapedAnswer
from pagestream.server.tools.reply import Part


class Item:
    """One item of the output as it grows: a message, a reasoning or a function call."""

    def __init__(self, part: Part):
        self.kind = part.kind
        self.call_id, self.name = part.call_id, part.name
        self.id = {"content": "msg", "reasoning": "rs", "call": "fc"}[part.kind] + "_" + uuid.uuid4().hex
        self.text = ""

    def takes(self, part: Part) -> bool:
        return part.kind == self.kind and part.call_id is None

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def shown(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "status": status}
        if self.kind == "call":
            return {**head, "type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if status != "in_progress" else []
        if self.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}


class ResponseAnswer(ShapedAnswer):
    id_prefix = "resp"
    names = {"response_format": "text.format", "messages": "input", "max_tokens": "max_output_tokens"}
    asked: ResponsesRequest

    def response(self, status: str, items: list[Item], error: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = self.asked
        usage = self.usage()
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},  # none is charged for
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        choice = asked.tool_choice
        text = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.model,
            "output": [item.shown("incomplete" if item is items[-1] and status != "completed" else "completed") for item in items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else told,
            "metadata": asked.metadata or {},
            "user": asked.user,
        }

    def opening(self) -> list[NamedEvent]:
        self._items: list[Item] = []
        response = self.response("in_progress", [])
        return [("response.created", {"response": response}), ("response.in_progress", {"response": response})]

    def told(self, piece: Piece) -> Iterator[NamedEvent]:
        items = self._items
        for part in parts_of(piece, self.reader):
            if not items or not items[-1].takes(part):
                yield from ended(items, "completed")
                items.append(Item(part))
                yield from begun(items)
            if part.text:
                items[-1].text += part.text
                yield delta(items, part.text)
        if piece.finish_reason is not None:
            status = "incomplete" if piece.finish_reason == "length" else "completed"
            yield from ended(items, status)
            yield f"response.{status}", {"response": self.response(status, items)}

    def failure(self, error: ApiError) -> NamedEvent:
        told = {"code": "server_error", "message": error.envelope()["error"]["message"]}
        return "response.failed", {"response": self.response("failed", self._items, error=told)}

    def fold(self, events: list[NamedEvent]) -> dict[str, Any]:
        """The last event holds it."""
        _, fields = events[-1]
        return fields["response"]

    def encoded(self, event: NamedEvent, number: int) -> bytes:
        name, fields = event
        return super().encoded((name, {"sequence_number": number, **fields}), number)


def place(items: list[Item]) -> dict[str, Any]:
    return {"item_id": items[-1].id, "output_index": len(items) - 1}


def begun(items: list[Item]) -> list[NamedEvent]:
    """The beginning of the last item."""
    item = items[-1]
    events = [("response.output_item.added", {"output_index": len(items) - 1, "item": item.shown("in_progress")})]
    if item.kind != "call":
        events.append(("response.content_part.added", {**place(items), "content_index": 0, "part": item.part()}))
    return events


def delta(items: list[Item], text: str) -> NamedEvent:
    if items[-1].kind == "call":
        return "response.function_call_arguments.delta", {**place(items), "delta": text}
    if items[-1].kind == "reasoning":
        return "response.reasoning_text.delta", {**place(items), "content_index": 0, "delta": text}
    return "response.output_text.delta", {**place(items), "content_index": 0, "delta": text, "logprobs": []}


def ended(items: list[Item], status: str) -> list[NamedEvent]:
    """The end of the last item, if there is one."""
    if not items:
        return []
    item, at = items[-1], place(items)
    events: list[NamedEvent] = []
    if item.kind == "call":
        events.append(("response.function_call_arguments.done", {**at, "name": item.name, "arguments": item.text}))
    else:
        name = "response.reasoning_text.done" if item.kind == "reasoning" else "response.output_text.done"
        logprobs: dict[str, Any] = {} if item.kind == "reasoning" else {"logprobs": []}
        events.append((name, {**at, "content_index": 0, "text": item.text, **logprobs}))
        events.append(("response.content_part.done", {**at, "content_index": 0, "part": item.part()}))
    events.append(("response.output_item.done", {"output_index": at["output_index"], "item": item.shown(status)}))
    return events
