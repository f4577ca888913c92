"""What a constraint costs: time between tokens, against the same request without it, in alternating rounds."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import pytest

from pagestream.engine import LLM, Constraint, SamplingParams

pytestmark = pytest.mark.slow

ROUNDS = 7
NUM_TOKENS = 64
PROMPT = "The history of the town begins with a small group of people who came over the hills in the spring of that year and"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Rome", "Oslo", "京都"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
# Each has long answers only, as long as the free ones are.
CONSTRAINTS = {
    "json_schema": json.dumps({"type": "array", "items": PERSON, "minItems": 40}),
    "regex": r"([A-Z][a-z]+(,? [a-z]+)*[.!?] ){40,}",
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_memory=0.25, enable_prefix_caching=False)


def between_tokens_s(llm: LLM, params: SamplingParams, count: int) -> float:
    """The median over the steps in which all answers gain a token."""
    engine = llm.llm_engine
    for number in range(count):
        engine.add_request(f"{number}", f"{number} {PROMPT}", params)
    times, last_s = [], None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        if sum(len(output.outputs[0].token_ids) for output in outputs if output.outputs) == count:
            if last_s is not None:
                times.append(now_s - last_s)
            last_s = now_s
    assert len(times) >= NUM_TOKENS // 2, "the answers must be long"
    return statistics.median(times)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", list(CONSTRAINTS))
def test_a_constraint_costs_at_most_15_percent(llm, kind, count):
    free = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    held = replace(free, ignore_eos=False, constraint=Constraint(kind, CONSTRAINTS[kind]))
    between_tokens_s(llm, free, count)
    between_tokens_s(llm, held, count)  # both once to warm up
    rounds = [(between_tokens_s(llm, held, count), between_tokens_s(llm, free, count)) for _ in range(ROUNDS)]
    ratio = statistics.median(first / second for first, second in rounds)
    free_s = statistics.median(second for _, second in rounds)
    print(f"\n{kind}, {count} streams: {free_s * 1000:.1f} ms between tokens without it, {ratio:.3f} of that with it")
    assert ratio <= 1.15
