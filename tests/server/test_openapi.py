"""openapi.yaml in the repository is what the server says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pagestream.server.app import bare_app
from pagestream.server.openapi import as_yaml
from tests.server.conftest import Live

ROOT = Path(__file__).resolve().parents[2]


def test_an_empty_input_is_described_as_none():
    text, items = bare_app().openapi()["components"]["schemas"]["ResponsesRequest"]["properties"]["input"]["anyOf"]
    assert (text["minLength"], items["minItems"]) == (1, 1)


def test_the_file_is_the_description():
    text = (ROOT / "openapi.yaml").read_text(encoding="utf-8")
    assert text == as_yaml(bare_app().openapi()), "run: pagestream openapi --output openapi.yaml"


def test_every_reference_leads_somewhere():
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text(encoding="utf-8"))
    schemas = document["components"]["schemas"]

    def references(node):
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    found = set(references(document))
    assert {
        "#/components/schemas/CompletionRequest",
        "#/components/schemas/ChatRequest",
        "#/components/schemas/ErrorEnvelope",
    } <= found
    assert {reference.rsplit("/", 1)[1] for reference in found} <= set(schemas)


def test_ranges_and_refusals_are_in_the_schema():
    schema = bare_app().openapi()["components"]["schemas"]["CompletionRequest"]
    assert schema["additionalProperties"] is False
    temperature = schema["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert set(schema["required"]) == {"model", "prompt"}


def test_every_enum_is_of_one_type():
    """Else generators of clients leave the request out that has it, with its route."""

    def enums(node):
        if isinstance(node, dict):
            yield from ([node["enum"]] if isinstance(node.get("enum"), list) else [])
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from enums(child)

    found = list(enums(bare_app().openapi()))
    assert len(found) > 10
    assert all(len({type(value) for value in values}) == 1 for values in found)


TURNS = [{"role": "user", "content": "Hello"}]


FAULT = {"x_fault": {"kind": "raise", "at_token": 3}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hello", "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "Hello", **FAULT}),
        ("/v1/chat/completions", {"messages": TURNS, "logprobs": True, "top_logprobs": 1, "n": 2}),
        ("/v1/chat/completions", {"messages": TURNS, **FAULT}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/messages", {"messages": TURNS, "cache_control": {"type": "ephemeral"}}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_every_event_of_a_stream_is_as_described(live: Live, path, fields):
    document = bare_app().openapi()
    item = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["x-itemSchema"]
    validator = Draft202012Validator({**item["properties"]["data"]["contentSchema"], "components": document["components"]})
    limit = {"max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8}
    blocks = live.post(path, **fields, **limit, temperature=0, stream=True).text.split("\n\n")
    assert blocks.pop() == ""
    if "event" not in item["required"]:
        assert blocks.pop() == "data: [DONE]"
    assert len(blocks) > 1
    for block in blocks:
        told = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(told) == set(item["required"])
        assert told.get("event") in (None, *item["properties"].get("event", {}).get("enum", ()))
        validator.validate(json.loads(told["data"]))
