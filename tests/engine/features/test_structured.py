"""Structured output over a tiny model with random weights: whatever it would rather say, its answers belong to the language."""

from __future__ import annotations

import json
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from pagestream.engine import LLM, Constraint, FinishReason, InvalidRequest, SamplingParams
from pagestream.engine.features.structured.mask import rule_out_on_device, rule_out_on_host

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "ré"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def make(folder: Path, **options: Any) -> LLM:
    return LLM(**{"model": str(folder), "num_kv_blocks": 512, "device": "cpu", "cpu_threads": 1, **options})


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return make(tiny_llama)


def constrained(kind: str, text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "seed": 1, "constraint": Constraint(kind, text, "it"), **params})


def as_schema(schema: Any, **params: Any) -> SamplingParams:
    return constrained("json_schema", json.dumps(schema), **params)


def texts(llm: LLM, prompts: list[str], params: Any) -> list[list[str]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(answer.finish_reason is FinishReason.STOP for output in outputs for answer in output.outputs)
    return [[answer.text for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "[a-f]{3}-[0-9]{4}", "[a-f]{3}-[0-9]{4}"),
        ("regex", "(京都|né){2}", "(京都|né){2}"),
        ("choice", json.dumps(["red", 'a "quoted" \\ one', "京都"]), r'red|a "quoted" \\ one|京都'),
        ("grammar", 'start: "a" start | "b"', "a*b"),
        ("grammar", 'root ::= "x" [0-9] [0-9]', "x[0-9]{2}"),
    ],
)
def test_answers_belong_to_the_language(llm, kind, text, pattern, temperature):
    for answers in texts(llm, ["the quick", "a fox"], constrained(kind, text, n=3, temperature=temperature)):
        assert all(re.fullmatch(pattern, answer) for answer in answers), answers


DEFINITIONS = {
    "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
    "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "code": {"$ref": "#/$defs/code"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Bounded in every direction, so that every answer ends."""
    flat = ["enum", "string", "pattern", "integer", "number", "boolean", "null", "const", "several types"]
    kinds = flat + ["object", "array", "tuple", "map", "anyOf", "$ref"] * (depth < 3)
    match rng.choice(kinds if depth else ["object"]):
        case "enum":
            return {"enum": rng.sample(["a", "b\n", 1, 2.5, None, True, "é", {"k": []}], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 0, False, ["x"]])}
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(ab|cd)+e?$".replace("+", "{1,3}"), r"^\d{3}-\d{2}$"])}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 500)}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randrange(2), "maxItems": 3}
        case "number":
            return {"type": "number", "minimum": -3.5, "exclusiveMaximum": 1000}
        case "several types":
            return {"type": rng.sample(["boolean", "null", "integer"], 2), "minimum": 0, "maximum": 99}
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "map":
            names_of = {"^[a-z]{1,3}$": random_schema(rng, depth + 1)}
            return {"type": "object", "patternProperties": names_of, "additionalProperties": False, "maxProperties": 2}
        case "$ref":
            return {"$ref": f"#/$defs/{rng.choice(list(DEFINITIONS))}"}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["one", "two", "three", "a b", "é"], rng.randrange(1, 4))
            required = [name for name in names if rng.random() < 0.7]
            properties = {name: random_schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def test_200_random_schemas_are_obeyed(llm):
    rng = random.Random(7)
    schemas = [random_schema(rng) | {"$defs": DEFINITIONS} for _ in range(200)]
    params = [as_schema(schema, max_tokens=480, temperature=1, seed=at) for at, schema in enumerate(schemas)]
    outputs = llm.generate(["the quick"] * 200, params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.outputs[0].finish_reason is FinishReason.STOP, "bounded in every direction"
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


def test_company_chunks_and_preemption_change_nothing(llm, tiny_llama):
    prompts = [f"{number} the morning comes " * 3 for number in range(8)]
    params = [as_schema(PERSON, temperature=number % 2, seed=number, logprobs=2) for number in range(8)]
    solo = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    tight = make(tiny_llama, num_kv_blocks=40, preemption_mode="recompute", max_num_batched_tokens=32, max_num_seqs=8)
    together = tight.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in solo]
    assert [output.outputs[0].logprobs for output in together] == [output.outputs[0].logprobs for output in solo]
    for output in together:
        jsonschema.validate(json.loads(output.outputs[0].text), PERSON)


def test_many_constrained_rows_in_one_step(llm):
    params = [as_schema(PERSON, temperature=1, seed=seed) for seed in range(40)]
    together = llm.generate(["a fox"] * 40, params, use_tqdm=False)
    for seed in (0, 39):
        assert llm.generate("a fox", params[seed], use_tqdm=False)[0].outputs == together[seed].outputs


def test_an_unconstrained_neighbour_is_untouched(llm):
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = llm.generate("a fox", free, use_tqdm=False)[0].outputs[0].token_ids
    _, beside = llm.generate(["a fox", "a fox"], [as_schema(PERSON), free], use_tqdm=False)
    assert beside.outputs[0].token_ids == alone


def test_a_stop_string_ends_it_first(llm):
    output = llm.generate("a", constrained("regex", "x{5}y{5}", stop=("xy",), temperature=0), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("xxxx", FinishReason.STOP, "xy")


def test_max_tokens_may_cut_it(llm):
    output = llm.generate("a", constrained("regex", "x{50}", max_tokens=3), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason is FinishReason.LENGTH
    assert set(output.text) == {"x"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(["),
        ("regex", "(?=a)b"),
        ("regex", "x" * 70_000),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("grammar", "nonsense"),
        ("grammar", "start: start"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"not": {}}'),
        ("json_schema", '{"$ref": "http://example.org/schema"}'),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "number"}]}'),
        ("a kind of its own", ""),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_once(llm, kind, text):
    start_s = time.process_time()  # what it costs, however busy the machine is with something else
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate("a", constrained(kind, text), use_tqdm=False)
    assert time.process_time() - start_s < 2
    assert (refusal.value.param, refusal.value.code) == ("it", "invalid_constraint")
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("lark", 'start: call\ncall: "f" args\nargs: %json {"type":"objct"}\n', "failed to compile JSON schema: Invalid type: objct"),
        ("regex", "(", 'invalid regex "(" (in regex): regex parse error: ( ^ error: unclosed group'),
        ("grammar", "start: x", 'at 1(8): unknown name: "x" 1 | start: x ^'),  # the caller's own: where in it
    ],
)
def test_a_refusal_quotes_no_grammar_that_the_caller_has_not_written(llm, kind, text, told):
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate("a", constrained(kind, text), use_tqdm=False)
    assert refusal.value.message == f"it can't be compiled: {told}"


@pytest.mark.parametrize("text", ["(a+)+$", "(x+x+)+y", "((a{0,100}){0,100}){0,100}", "(.*a.{15}){3}", "(.|a|b)*(a|b){40}c"])
def test_no_regex_takes_long(llm, text):
    start_s = time.process_time()  # what it costs, however busy the machine is with something else
    with suppress(InvalidRequest):  # obeyed or refused, but soon
        llm.generate("a", constrained("regex", text, max_tokens=4), use_tqdm=False)
    assert time.process_time() - start_s < 2


@pytest.mark.parametrize("vocab_size", [31, 32, 320, 1001])
def test_masks_are_the_same_on_host_and_device(vocab_size):
    rng = np.random.default_rng(vocab_size)
    bits = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    logits = torch.randn(4, vocab_size)
    on_host, on_device = logits.clone(), logits.clone()
    rule_out_on_host(on_host, [0, 3], bits)
    rule_out_on_device(on_device, [0, 3], bits)
    assert torch.equal(on_host, on_device)
    assert torch.equal(on_host[1:3], logits[1:3])
    for row, words in ((0, bits[0]), (3, bits[1])):
        for token_id in range(vocab_size):
            is_allowed = words[token_id // 32] >> (token_id % 32) & 1
            assert on_host[row, token_id] == (logits[row, token_id] if is_allowed else -torch.inf)
