"""What the events of GET /v1/engine/events add up to."""

from __future__ import annotations

from typing import Any


class EngineState:
    """`blocks` and `swap` are [owner or None, references, flags] by id; `requests` by their number, with whole tables."""

    def __init__(self) -> None:
        self.engine: dict[str, Any] = {}
        self.blocks: dict[int, list[Any]] = {}
        self.swap: dict[int, list[Any]] = {}
        self.requests: dict[int, dict[str, Any]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        is_whole = event["kind"] == "full"
        if is_whole:
            self.__init__()  # type: ignore[misc]  # forget everything
        self.engine |= event.get("engine", {})
        for target, name in ((self.blocks, "blocks"), (self.swap, "swap")):
            for key, block in event.get(name, {}).items():
                if block is None:
                    target.pop(int(key), None)
                else:
                    target[int(key)] = block
        for key, change in event.get("requests", {}).items():
            if change is None:
                self.requests.pop(int(key), None)
                continue
            request = self.requests.setdefault(int(key), {"tables": []})
            old = request["tables"]
            request.update(change)
            if "tables" in change and not is_whole:
                request["tables"] = [
                    (old[index][:kept] if index < len(old) else []) + more for index, (kept, more) in enumerate(change["tables"])
                ]
