"""`pagestream top`: the live view of a running server's engine, in the terminal."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagestream.server.commands.client import DEFAULT_URL, Key, Url, connected, stream
from pagestream.server.commands.engine_state import EngineState

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue")
ORDER = ("running", "swapped", "waiting")
STATE_COLOURS = {"running": "green", "swapped": "magenta", "waiting": "yellow"}
PARTS = ("schedule", "forward", "sample", "detokenize")
MAX_CELLS = 1200  # more blocks than that, or than a third of the screen has room for, are shown several to a cell


def top(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and end.")] = False,
) -> None:
    """Watch the engine of a running server: its blocks, its queues, its pace.  Ctrl-C ends."""
    from rich.console import Console
    from rich.live import Live

    state, rates = EngineState(), Rates()
    with connected(url, api_key) as client:
        events = stream(client, "GET", "/v1/engine/events")
        if once:
            state.apply(next(events))
            Console().print(picture(state, rates))
            return
        with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
            shown_s = 0.0
            for event in events:
                state.apply(event)
                rates.take(state.engine)
                if time.monotonic() - shown_s >= 0.2:
                    shown_s = time.monotonic()
                    width, height = live.console.size
                    live.update(picture(state, rates, max(1, (width - 4) * (height // 3))), refresh=True)


class Rates:
    """Per second and per step, over the last second or so."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self.tokens_per_s = self.prompt_tokens_per_s = self.step_s = 0.0
        self.parts: dict[str, float] = {}

    def take(self, engine: dict[str, Any]) -> None:
        last = self._last
        if last is None or engine["num_steps"] < last["num_steps"]:
            self._last = dict(engine)
            return
        passed_s = engine["now_s"] - last["now_s"]
        if passed_s < 1:
            return
        num_steps = max(1, engine["num_steps"] - last["num_steps"])
        sampled = engine["num_sampled_tokens"] - last["num_sampled_tokens"]
        self.tokens_per_s = sampled / passed_s
        self.prompt_tokens_per_s = max(0, engine["num_scheduled_tokens"] - last["num_scheduled_tokens"] - sampled) / passed_s
        self.parts = {part: (engine[f"{part}_s"] - last[f"{part}_s"]) / num_steps for part in PARTS}
        self.step_s = sum(self.parts.values())
        self._last = dict(engine)


def picture(state: EngineState, rates: Rates, most_cells: int = MAX_CELLS) -> RenderableType:
    """`most_cells` is what there is room for: the requests below the blocks should be seen too."""
    from rich.console import Group
    from rich.panel import Panel

    engine = state.engine
    parts: list[RenderableType] = [Panel(heading(state, rates), title="pagestream", title_align="left", border_style="dim")]
    free = f"{engine['num_free']:,} of {engine['num_blocks']:,} free"
    parts.append(Panel(grid(state.blocks, engine["num_blocks"], most_cells), title=f"KV blocks, {free}", title_align="left", border_style="dim"))
    if engine["num_swap_blocks"]:
        free = f"{engine['num_swap_free']:,} of {engine['num_swap_blocks']:,} free"
        swap = grid(state.swap, engine["num_swap_blocks"], most_cells // 2)
        parts.append(Panel(swap, title=f"swap pool, {free}", title_align="left", border_style="dim"))
    parts.append(requests_table(state))
    return Group(*parts)


def heading(state: EngineState, rates: Rates) -> Text:
    """What there is, and below how fast it goes: each line fits 80 columns, but for the parts of a step."""
    from rich.text import Text

    engine = state.engine
    counts = {status: sum(request["status"] == status for request in state.requests.values()) for status in ORDER}
    text = Text()
    for status in ORDER:
        text.append(f"{counts[status]:>4} {status}", STATE_COLOURS[status] if counts[status] else "dim")
    text.append(f"    gave way {engine['num_preempted']}   copied {engine['num_copied_blocks']}\n")
    text.append(f"{rates.tokens_per_s:>4,.0f} tokens/s", "bold")
    text.append(f"   prompts {rates.prompt_tokens_per_s:,.0f}/s   step {rates.step_s * 1000:.1f} ms")
    if rates.parts:
        text.append(" (" + ", ".join(f"{part} {seconds * 1000:.1f}" for part, seconds in rates.parts.items()) + ")", "dim")
    return text


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def grid(blocks: dict[int, list[Any]], num_blocks: int, most_cells: int = MAX_CELLS) -> Text:
    """█ held, ▓ shared, ░ free but cached, · free."""
    from rich.text import Text

    per_cell = -(-num_blocks // max(1, min(MAX_CELLS, most_cells)))
    text = Text()
    for first in range(0, num_blocks, per_cell):
        # Where a cell stands for several blocks, it shows the one that most hold on to.
        block = max((blocks[at] for at in range(first, min(first + per_cell, num_blocks)) if at in blocks), key=lambda one: one[1], default=None)
        if block is None:
            text.append("·", "dim")
        elif block[0] is None:
            text.append("░", "dim")
        else:
            text.append("▓" if block[1] > 1 else "█", colour_of(block[0]))
    return text


def requests_table(state: EngineState) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("request", "state", "age", "prompt", "answer", "blocks", "swapped", "recomputed", "id"):
        table.add_column(name, justify="left" if name in ("request", "state", "id") else "right", no_wrap=True)
    ranked = sorted(state.requests.items(), key=lambda item: (ORDER.index(item[1]["status"]), item[0]))
    for number, request in ranked:
        blocks = {block_id for table_ids in request["tables"] for block_id in table_ids}
        table.add_row(
            f"[{colour_of(number)}]■[/] #{number}",
            f"[{STATE_COLOURS[request['status']]}]{request['status']}[/]",
            f"{max(0.0, state.engine['now_s'] - request['arrival_s']):.1f} s",
            f"{request['num_prompt_tokens']:,}",
            f"{request['num_output_tokens']:,}",
            f"{len(blocks):,}",
            str(request["num_preempted_swap"]),
            str(request["num_preempted_recompute"]),
            f"[dim]{request['request_id']}[/]",
        )
    return table
