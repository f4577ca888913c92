"""POST /v1/messages, read by the official Python client of that API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import pydantic
import pytest

from pagestream.engine import FinishReason, RequestFailed
from pagestream.server.messages.shapes import AnthropicError, AnthropicMessage, TokenCount
from pagestream.server.messages.wire import MessagesRequest
from tests.server.conftest import Live, refusal_of, served_model
from tests.tiny_models import make_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "long", max_position_embeddings=2048)
    with served_model(folder, max_num_seqs=8) as server:
        yield server


def client_of(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=60)


def as_client(asked: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the client's methods, of which temperature is none any more."""
    known = {name: value for name, value in asked.items() if name != "temperature"}
    return known | {"extra_body": {"temperature": asked["temperature"]}}


@pytest.mark.parametrize("fields", [{}, {"system": "Be brief."}, {"stop_sequences": ["\n", " a"]}, {"max_tokens": 3}])
def test_streamed_equals_whole(live: Live, fields):
    asked = ASKED | {"temperature": 0, **fields}
    whole = live.client.post("/v1/messages", json=asked)
    assert whole.status_code == 200, whole.text
    AnthropicMessage.model_validate(whole.json())
    with client_of(live) as client:
        message = client.messages.create(**as_client(asked))
        with client.messages.stream(**as_client(asked)) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in message.content] == [text]
    assert (final.stop_reason, final.stop_sequence) == (message.stop_reason, message.stop_sequence)
    assert (final.usage.input_tokens, final.usage.output_tokens) == (message.usage.input_tokens, message.usage.output_tokens)
    if "max_tokens" in fields:
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    if message.stop_reason == "stop_sequence":
        assert message.stop_sequence in fields["stop_sequences"]


def test_the_events_are_the_apis(live: Live):
    raw = live.client.post("/v1/messages", json=ASKED | {"stream": True, "temperature": 0}).text
    blocks = [block.split("\n") for block in raw.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in blocks]
    assert [json.loads(lines[1].removeprefix("data: "))["type"] for lines in blocks] == names
    middle = [name for name in names if name != "content_block_delta"]
    assert middle == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_a_message_of_no_tokens_leaves_its_prompt_in_the_cache(real: Live):
    turns = [{"role": "user", "content": "A question that was asked by nobody yet."}]
    with client_of(real) as client:
        first = client.messages.create(model="m", messages=turns, max_tokens=0)
        second = client.messages.create(model="m", messages=turns, max_tokens=1)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    assert first.usage.cache_read_input_tokens < 16 <= second.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}])
def test_tools_are_called_and_answered(real: Live, choice):
    asked = ASKED | {"tools": [TOOL], "tool_choice": choice, "temperature": 0, "max_tokens": 100}
    with client_of(real) as client:
        message = client.messages.create(**as_client(asked))
        with client.messages.stream(**as_client(asked)) as stream:
            final = stream.get_final_message()
        (call,) = message.content
        jsonschema.validate(call.input, SCHEMA)
        assert message.stop_reason == final.stop_reason == "tool_use"
        assert (final.content[0].name, final.content[0].input) == (call.name, call.input)
        turns = [
            *ASKED["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]},
        ]
        after = client.messages.create(model="m", max_tokens=5, messages=turns, tools=[TOOL])
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > message.usage.input_tokens


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    is_old: bool


def test_an_answer_fits_the_schema_that_is_asked_for(real: Live):
    asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": ASKED["messages"]}
    with client_of(real) as client:
        message = client.messages.parse(**asked, output_format=Place)
        assert isinstance(message.parsed_output, Place)
        with client.messages.stream(**asked, output_format=Place) as stream:
            assert isinstance(stream.get_final_message().parsed_output, Place)
        error = refusal_of(real.client.post("/v1/messages", json=asked | {"output_config": schema_of({"type": "nonsense"})}))
    assert (error["param"], error["code"]) == ("output_config.format", "invalid_constraint")
    assert error["message"] == "output_config.format can't be compiled: Invalid type: nonsense"


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(real: Live):
    asked = ASKED | {"tools": [TOOL | {"strict": True}], "temperature": 1, "max_tokens": 60}
    schema = MessagesRequest.model_validate(asked).as_chat().tools[0].function  # type: ignore[index]
    assert (schema.strict, schema.parameters) == (True, SCHEMA)
    with client_of(real) as client:
        message = client.messages.create(**as_client(asked))
    for call in (block for block in message.content if block.type == "tool_use"):
        jsonschema.validate(call.input, SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"max_token": 1}, "max_token"),
        ({"tools": [TOOL, TOOL]}, "tools"),
    ],
)
def test_refusals_name_the_field(live: Live, fields, param):
    assert refusal_of(live.client.post("/v1/messages", json=ASKED | fields))["param"] == param


def test_a_failure_in_a_stream_is_an_event(live: Live):
    live.engine.step_s, before = 0.02, live.engine.step_s
    try:
        asked = ASKED | {"stream": True, "max_tokens": 400, "temperature": 0}
        with live.client.stream("POST", "/v1/messages", json=asked) as response:
            lines = response.iter_lines()
            assert any("content_block_delta" in line for line in lines)
            failure = RequestFailed("a step failed")
            live.on_loop(lambda: [live.engine.end(stream, FinishReason.ERROR, failure) for stream in list(live.engine.streams)])
            rest = list(lines)
    finally:
        live.engine.step_s = before
    assert "event: message_stop" not in rest
    told = json.loads(rest[rest.index("event: error") + 1].removeprefix("data: "))
    AnthropicError.model_validate(told)
    assert (told["error"]["message"], told["error"]["type"]) == ("a step failed", "api_error")


def test_a_breakpoint_for_the_cache_is_taken_wherever_it_stands_and_changes_nothing(live: Live):
    mark = {"cache_control": {"type": "ephemeral"}}
    asked = ASKED | {"temperature": 0, "system": [{"type": "text", "text": "Be brief."}]}
    marked = asked | mark | {"system": [asked["system"][0] | mark], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"} | mark]}
    ]}  # fmt: skip
    with client_of(live) as client:
        plain, other = (client.messages.create(**as_client(fields)) for fields in (asked, marked))
    assert (plain.content[0].text, plain.stop_reason) == (other.content[0].text, other.stop_reason)
    assert refusal_of(live.client.post("/v1/messages", json=ASKED | {"cache_control": True}))["param"] == "cache_control"


TURNS = [
    {"role": "user", "content": "What is the weather in Rome?"},
    {"role": "assistant", "content": [
        {"type": "text", "text": "I will ask."}, {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny."}]}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [{"type": "text", "text": "Be brief."}], "cache_control": {"type": "ephemeral"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}, "system": "Be brief."},
        {"tools": [TOOL], "messages": TURNS},
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "The best of"}]},
        {"tools": [TOOL | {"strict": True}], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}},
    ],
)
def test_a_count_is_what_the_message_is_charged_for(real: Live, fields):
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"} | fields
    with client_of(real) as client:
        count = client.messages.count_tokens(**asked)
        before = real.metric("vllm:generation_tokens_total")
        assert client.messages.count_tokens(**asked).input_tokens == count.input_tokens
        assert real.metric("vllm:generation_tokens_total") == before
        usage = client.messages.create(**asked, max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 0
    TokenCount.model_validate(real.client.post("/v1/messages/count_tokens", json=asked).json())


def test_what_is_too_long_for_the_model_is_counted_all_the_same(real: Live):
    turns = [{"role": "user", "content": "Hello " * 5000}]
    with client_of(real) as client:
        count = client.messages.count_tokens(model="m", messages=turns).input_tokens
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="m", messages=turns, max_tokens=1)
    assert count >= 5000
    assert f"{count}" in refused.value.api_message.replace(",", "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),  # nothing is generated
        ({"message": 1}, "message"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_a_count_refuses_as_a_message_does(live: Live, fields, param):
    asked = {"model": "m", "messages": ASKED["messages"]} | fields
    assert refusal_of(live.client.post("/v1/messages/count_tokens", json=asked))["param"] == param


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_refusals_are_the_apis(start, path):
    live: Live = start(api_keys=("k",), max_body_bytes=2000)
    asked = {"model": "m", "messages": ASKED["messages"]} | ({"max_tokens": 1} if path == "/v1/messages" else {})

    def refused(status: int, headers: dict[str, str], **sent: Any) -> str:
        response: httpx.Response = live.client.post(path, headers=headers, **sent)
        AnthropicError.model_validate(response.json())
        assert response.headers["request-id"] == response.headers["x-request-id"]
        return refusal_of(response, status)["type"]

    key = {"x-api-key": "k"}
    assert refused(401, {}, json=asked) == "authentication_error"
    assert refused(400, key, json=asked | {"messages": 5}) == "invalid_request_error"
    assert refused(404, key, json=asked | {"model": "other"}) == "not_found_error"
    assert refused(413, key, json=asked | {"system": "a" * 3000}) == "request_too_large"
    client = anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0, timeout=60)
    with client, pytest.raises(anthropic.AuthenticationError) as error:
        client.messages.count_tokens(model="m", messages=ASKED["messages"])
    assert error.value.type == "authentication_error"
    assert error.value.request_id
