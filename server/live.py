"""GET /v1/engine/events: the engine as it is, ten times a second at most, as server-sent events.

One task looks for all who watch, and none looks while nobody does.  A watcher first gets the whole state and then what has
changed; one who reads too slowly gets a whole state again instead of what it missed, so it costs one event of memory.

    {"kind": "full" | "delta", "engine": {…}, "blocks": {id: block}, "swap": {id: block}, "requests": {number: request}}

A block is [owner or null, references, flags], with flags 1 for cached and 2 for copied on write since the last event; those not
named are free.  In a delta only what has changed is there, null for what is gone, and of a request only its changed fields;
its tables come as [kept, [ids]] each: the first `kept` ids are as before, then these.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from sse_starlette import EventSourceResponse

from pagestream.engine import EngineDead
from pagestream.server.sse import keep_alive
from pagestream.server.state import server_state

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine, EngineView, LiveRequest

log = logging.getLogger(__name__)

UPDATE_S = 0.1
# While requests run, so much of the time may go into looking and telling: a large pool is looked at less often, and so is one that
# many look at.  What it takes from the requests is several times that, as the operators use every core and wait for the slowest.
MAX_SHARE = 0.004
TELLING_S = 0.0003  # what an event costs for each who gets it
AFTER_THE_START_S = 0.001  # of the next step: until then, the step would wait for what is done here

State = dict[str, dict[Any, Any]]


class LiveFeed:
    """Belongs to one engine; used on its event loop only."""

    def __init__(self, engine: AsyncLLMEngine):
        self._engine = engine
        self._watchers: set[Watcher] = set()
        self._state: State | None = None
        self._task: asyncio.Task[None] | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """Until the engine ends or has drained."""
        watcher = Watcher(self._state)
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="pagestream-live-view")
        try:
            while (event := await watcher.next_event()) is not None:
                yield event
        finally:
            self._watchers.discard(watcher)

    async def _look(self) -> None:
        try:
            with self._engine.watched():
                while self._watchers:
                    view = await self._engine.live_view()
                    await asyncio.sleep(AFTER_THE_START_S)
                    start_s = time.perf_counter()
                    self._tell(state_of(view))
                    if not view.requests and not self._engine.is_ready:
                        return
                    spent_s = view.cost_s + time.perf_counter() - start_s + TELLING_S * len(self._watchers)
                    await asyncio.sleep(max(UPDATE_S, spent_s / MAX_SHARE) if view.requests else UPDATE_S)
        except EngineDead:
            log.info("the live view ends with its engine")
        except Exception:
            log.exception("the live view failed")
        finally:
            self._state = None
            for watcher in self._watchers:
                watcher.end()

    def _tell(self, state: State) -> None:
        change = None if self._state is None else delta(self._state, state)
        self._state = state
        # Encoded once for all of them, and only in the form that somebody needs.
        event = None if change is None else encode_event("delta", change)
        for watcher in self._watchers:
            watcher.put(event, state)


class Watcher:
    """A mailbox with one slot."""

    def __init__(self, state: State | None):
        self._slot: bytes | None = None
        self._full: State | None = state  # what it is to get instead of a delta
        self._is_behind = True
        self._is_ended = False  # what is left may still be had
        self._news = asyncio.Event()
        if state is not None:
            self._news.set()

    def put(self, event: bytes | None, state: State) -> None:
        if self._is_behind or self._slot is not None:
            self._slot, self._full, self._is_behind = None, state, True
        elif event is not None:
            self._slot = event
        else:
            return
        self._news.set()

    def end(self) -> None:
        self._is_ended = True
        self._news.set()

    async def next_event(self) -> bytes | None:
        """None after the last."""
        await self._news.wait()
        if not self._is_ended:
            self._news.clear()
        if self._is_behind and self._full is not None:
            full, self._full, self._is_behind = self._full, None, False
            return encode_event("full", full)
        event, self._slot = self._slot, None
        return event


def encode_event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps({"kind": kind, **content}, separators=(",", ":")).encode("ascii") + b"\n\n"


# ---- a view as plain data ---------------------------------------------------------------------------------------------


def state_of(view: EngineView) -> State:
    device, host = view.device, view.host
    engine = {
        "now_s": round(view.now_s, 3),
        "block_size": view.block_size,
        "num_blocks": device.num_blocks,
        "num_free": device.num_free,
        "num_swap_blocks": host.num_blocks,
        "num_swap_free": host.num_free,
        **{name: round(value, 6) for name, value in asdict(view.totals).items()},
    }
    requests = {request.number: plain_request(request) for request in view.requests}
    return {"engine": engine, "blocks": dict(device.blocks), "swap": dict(host.blocks), "requests": requests}


def plain_request(request: LiveRequest) -> dict[str, Any]:
    plain = {name: getattr(request, name) for name in type(request).__dataclass_fields__ if name not in ("number", "tables")}
    return {**plain, "arrival_s": round(request.arrival_s, 3), "tables": request.tables}


# ---- what has changed -------------------------------------------------------------------------------------------------


def delta(old: State, new: State) -> dict[str, Any] | None:
    """None where nothing has but the clock."""
    change: dict[str, Any] = {}
    for section in ("blocks", "swap"):
        if changed := changed_items(old[section], new[section]):
            change[section] = changed
    requests: dict[int, Any] = dict.fromkeys(old["requests"].keys() - new["requests"].keys())
    for number, request in new["requests"].items():
        before = old["requests"].get(number)
        if before is None:
            requests[number] = {**request, "tables": table_changes((), request["tables"])}
        elif changed := changed_items(before, request):
            if "tables" in changed:
                changed["tables"] = table_changes(before["tables"], request["tables"])
            requests[number] = changed
    if requests:
        change["requests"] = requests
    engine = changed_items(old["engine"], new["engine"])
    if not change and engine.keys() <= {"now_s"}:
        return None
    return {"engine": engine, **change}


def changed_items(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    changed = {key: value for key, value in new.items() if old.get(key) != value or key not in old}
    changed.update((key, None) for key in old.keys() - new.keys())
    return changed


def table_changes(old: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]) -> list[list[Any]]:
    changes = []
    for index, table in enumerate(new):
        kept = len(commonprefix([old[index], table])) if index < len(old) else 0
        changes.append([kept, table[kept:]])
    return changes


# ---- the route --------------------------------------------------------------------------------------------------------


async def get_engine_events(http: Request) -> Response:
    """The state of the engine, first whole and then as it changes."""
    state = server_state(http)
    return EventSourceResponse(
        state.live.events(),
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        ping=state.settings.sse_keep_alive_interval_s,
        ping_message_factory=keep_alive,
        sep="\n",
    )
