"""Several servers measured in one run: who takes part, and what the first of them is to each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.engine import StartError

NAMED = re.compile(r"(?P<name>[\w.-]+)=(?P<url>https?://.+)")


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    url: str  # with its /v1
    model: str


def read_contestant(text: str) -> tuple[str, str]:
    """NAME=URL, or a URL that is its own name."""
    text = text.rstrip("/")
    found = NAMED.fullmatch(text)
    return (found["name"], found["url"]) if found else (text, text)


def check_names(names: Sequence[str]) -> None:
    """Raises StartError unless each is there once."""
    for name in names:
        if names.count(name) > 1:
            raise StartError(f"two servers are called {name}; give each a name of its own, as NAME=URL")


def ratio_rows(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per load, the first server's figures over each other's: of rates the higher the better, of times the lower."""
    rows = []
    for load in dict.fromkeys(entry["load"] for entry in table):
        first, *others = (entry for entry in table if entry["load"] == load)
        rows += [
            {
                "at once": load,
                "servers": f"{first['server']} / {other['server']}",
                "out tok/s": over(first["output_tokens_per_s"], other["output_tokens_per_s"]),
                "in tok/s": over(first["prompt_tokens_per_s"], other["prompt_tokens_per_s"]),
                "TTFT p50": over(first["ttft_ms"]["p50"], other["ttft_ms"]["p50"]),
                "inter-token p50": over(first["inter_token_ms"]["p50"], other["inter_token_ms"]["p50"]),
                "end-to-end p50": over(first["end_to_end_ms"]["p50"], other["end_to_end_ms"]["p50"]),
            }
            for other in others
        ]
    return rows


def over(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.2f}" if theirs else "-"
