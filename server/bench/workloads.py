"""What is asked of a server under load: the same prompts for the same seed, whoever is measured."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from pagestream.engine import StartError

# Common English words, each about one token to most vocabularies, so that a count of words is about a count of tokens.
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were", "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more", "if", "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time", "new", "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over", "such", "our", "man", "me", "even", "most", "made", "after", "also", "did", "many", "off", "before", "must", "well", "back", "through", "years", "much", "where", "your", "way", "down", "should", "because", "long", "each", "just", "state", "people"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of `own_words`, behind a beginning of `common_words` that all of them share."""

    common_words: int
    own_words: int
    max_tokens: int


WORKLOADS = {
    "chat": Workload(0, 100, 128),
    "prefill": Workload(0, 1500, 16),
    "shared": Workload(1200, 40, 64),
    "long": Workload(0, 3000, 256),
}


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: str
    max_tokens: int


def make_asks(name: str, count: int, seed: int) -> list[Ask]:
    workload = WORKLOADS[name]
    rng = random.Random(seed)
    common = [rng.choice(WORDS) for _ in range(workload.common_words)]
    return [
        Ask(" ".join(common + [rng.choice(WORDS) for _ in range(workload.own_words)]), workload.max_tokens) for _ in range(count)
    ]


def read_asks(path: Path, count: int) -> list[Ask]:
    """The first `count` lines of a JSONL file, {"prompt": text, "max_tokens": number} each; from the start again if it is short.

    Raises StartError naming the line that is wrong.
    """
    asks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            asks.append(Ask(str(entry["prompt"]), int(entry.get("max_tokens", 128))))
        except (ValueError, TypeError, KeyError) as error:
            raise StartError(f'{path}, line {number}: a line is {{"prompt": text, "max_tokens": number}} ({error!r})') from None
    if not asks:
        raise StartError(f"{path} holds no requests")
    return [asks[index % len(asks)] for index in range(count)]


def arrivals_s(count: int, rate: float, seed: int) -> list[float]:
    """When each request is sent: a Poisson process of so many a second."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times
