"""One round of streaming requests on any OpenAI-compatible server, and what it felt like to its clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import httpx

from pagestream.server.bench.workloads import Ask, arrivals_s
from pagestream.server.commands.client import headers_for

TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; times in seconds since it was sent."""

    first_token_s: float = 0.0
    end_s: float = 0.0
    inter_token_s: float = 0.0  # per token, after the first
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good; None: anything."""

    first_token_s: float | None = None
    inter_token_s: float | None = None

    def is_met_by(self, outcome: Outcome) -> bool:
        if outcome.error:
            return False
        in_time = self.first_token_s is None or outcome.first_token_s <= self.first_token_s
        return in_time and (self.inter_token_s is None or outcome.inter_token_s <= self.inter_token_s)


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)
        return cls(*(ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """One round; milliseconds where the name says so."""

    num_requests: int
    num_failed: int
    wall_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float  # goodput: those that met the objective
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    end_to_end_ms: Percentiles
    errors: list[str] = field(default_factory=list)  # the first few

    def as_dict(self) -> dict:
        return asdict(self)


async def run_round(
    url: str,
    model: str,
    asks: Sequence[Ask],
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    api_key: str | None = None,
    objective: Objective | None = None,
) -> Summary:
    """Send all of them, so many at a time or at so many a second; exactly one of the two is given.  url ends in /v1."""
    gate = asyncio.Semaphore(concurrency or len(asks))
    due_s = [0.0] * len(asks) if rate is None else arrivals_s(len(asks), rate, seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=headers_for(api_key)) as client:

        async def send(ask: Ask, wait_s: float) -> Outcome:
            await asyncio.sleep(wait_s)
            async with gate:
                return await send_one(client, url, model, ask)

        started_s = time.perf_counter()
        outcomes = await asyncio.gather(*(send(ask, wait_s) for ask, wait_s in zip(asks, due_s, strict=True)))
        wall_s = time.perf_counter() - started_s
    return summarise(outcomes, wall_s, objective or Objective())


async def send_one(client: httpx.AsyncClient, url: str, model: str, ask: Ask) -> Outcome:
    """A failed request is a figure of the server, not the end of the measurement."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.perf_counter()
    first_s = last_s = 0.0
    num_chunks, usage = 0, None
    try:
        async with client.stream("POST", url + "/completions", json=body) as response:
            if response.status_code != 200:
                return Outcome(error=f"{response.status_code} {(await response.aread())[:200].decode(errors='replace')}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return Outcome(error=str(event["error"])[:200])
                usage = event.get("usage") or usage
                if event["choices"] and event["choices"][0]["text"]:
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                    num_chunks += 1
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return Outcome(error=repr(error)[:200])
    if not num_chunks:
        return Outcome(error="no token arrived")
    num_tokens = usage["completion_tokens"] if usage else num_chunks
    return Outcome(
        first_token_s=first_s - started_s,
        end_s=last_s - started_s,
        inter_token_s=(last_s - first_s) / max(num_tokens - 1, 1),
        num_prompt_tokens=usage["prompt_tokens"] if usage else 0,
        num_output_tokens=num_tokens,
    )


def summarise(outcomes: Sequence[Outcome], wall_s: float, objective: Objective) -> Summary:
    good = [outcome for outcome in outcomes if not outcome.error] or [Outcome()]

    def in_ms(name: str) -> Percentiles:
        return Percentiles.of([getattr(outcome, name) * 1e3 for outcome in good])

    return Summary(
        num_requests=len(outcomes),
        num_failed=sum(bool(outcome.error) for outcome in outcomes),
        wall_s=wall_s,
        output_tokens_per_s=sum(outcome.num_output_tokens for outcome in good) / wall_s,
        prompt_tokens_per_s=sum(outcome.num_prompt_tokens for outcome in good) / wall_s,
        requests_per_s=sum(not outcome.error for outcome in outcomes) / wall_s,
        good_requests_per_s=sum(objective.is_met_by(outcome) for outcome in outcomes) / wall_s,
        ttft_ms=in_ms("first_token_s"),
        inter_token_ms=in_ms("inter_token_s"),
        end_to_end_ms=in_ms("end_s"),
        errors=[outcome.error for outcome in outcomes if outcome.error][:3],
    )
