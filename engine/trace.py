"""A load to simulate: when requests come, how long they are, and which of them begin alike."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagestream.engine.core.errors import StartError

LONGEST_IN_MEANS = 8  # no generated length is longer than so many times its mean


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float  # since the trace's beginning
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | None = None  # requests of the same id begin with the same tokens
    prefix_tokens: int = 0  # so many of the prompt


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Requests that know nothing of each other; prompts and answers of exponential length."""

    num_requests: int
    rate: float  # requests per second
    seed: int = 0
    prompt_tokens: int = 256  # the mean
    output_tokens: int = 64  # the mean
    num_prefixes: int = 0  # a request begins with one of so many prefixes, drawn evenly; 0: all are different
    prefix_tokens: int = 0  # of each, before the prompt's own tokens

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.rate > 0:
            raise StartError(f"rate must be above 0, not {self.rate}")
        if self.num_prefixes < 0 or self.prefix_tokens < 0 or bool(self.num_prefixes) != bool(self.prefix_tokens):
            raise StartError("prefixes need both num_prefixes and prefix_tokens, above 0")

    def requests(self) -> list[TraceRequest]:
        """The same at every call."""
        rng = random.Random(self.seed)
        now_s = 0.0
        made = []
        for _ in range(self.num_requests):
            now_s += rng.expovariate(self.rate)
            prompt, output = draw_length(rng, self.prompt_tokens), draw_length(rng, self.output_tokens)
            prefix = str(rng.randrange(self.num_prefixes)) if self.num_prefixes else None
            made.append(TraceRequest(round(now_s, 6), self.prefix_tokens + prompt, output, prefix, self.prefix_tokens))
        return made


def draw_length(rng: random.Random, mean: int) -> int:
    return min(1 + int(rng.expovariate(1 / mean)), LONGEST_IN_MEANS * mean)


def read_trace(path: Path) -> list[TraceRequest]:
    """In the order of arrival.  Raises StartError naming the line and the field."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the trace {path} can't be read: {error}") from None
    found = [parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return sorted(found, key=lambda request: request.arrival_s)


def parse_line(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except ValueError:
        raise StartError(f"{where}: not JSON") from None
    if not isinstance(fields, dict):
        raise StartError(f"{where}: not an object")
    unknown = sorted(fields.keys() - TraceRequest.__dataclass_fields__.keys())
    if unknown:
        raise StartError(f"{where}: unknown field {unknown[0]!r}")
    arrival_s = fields.get("arrival_s")
    if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < 1e9:
        raise StartError(f"{where}: arrival_s must be seconds from 0, not {arrival_s!r}")
    prompt_tokens = whole(fields, "prompt_tokens", 1, where)
    prefix_tokens = whole({"prefix_tokens": 0, **fields}, "prefix_tokens", 0, where)
    prefix_id = fields.get("prefix_id")
    if prefix_tokens > prompt_tokens:
        raise StartError(f"{where}: prefix_tokens is {prefix_tokens} of {prompt_tokens} prompt_tokens")
    if prefix_tokens and prefix_id is None:
        raise StartError(f"{where}: prefix_tokens needs a prefix_id")
    name = None if prefix_id is None else str(prefix_id)
    return TraceRequest(float(arrival_s), prompt_tokens, whole(fields, "output_tokens", 1, where), name, prefix_tokens)


def whole(fields: dict[str, Any], name: str, least: int, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value < 2**31:
        raise StartError(f"{where}: {name} must be a whole number from {least}, not {value!r}")
    return value


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Raises StartError."""
    lines = [json.dumps({name: value for name, value in asdict(one).items() if value is not None}) for one in requests]
    try:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise StartError(f"the trace {path} can't be written: {error}") from None
