"""POST /v1/responses, read by the official client's typed models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from pagestream.engine import FinishReason, RequestFailed
from pagestream.server.responses_api.shapes import ResponseObject
from pagestream.server.responses_api.wire import ResponsesRequest
from tests.server.conftest import Live, refusal_of, served_model
from tests.tiny_models import make_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
FORMAT: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "long", max_position_embeddings=2048)
    with served_model(folder, max_num_seqs=8) as server:
        yield server


def both_ways(live: Live, **fields: Any) -> Any:
    """The client's response; the stream's last event holds the same output."""
    asked: dict[str, Any] = {"model": "m", "temperature": 0, **fields}
    body = live.client.post("/v1/responses", json=asked).json()
    ResponseObject.model_validate(body)
    TypeAdapter(Response).validate_python(body)  # the client itself lets anything pass
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        if whole.status == "completed":  # the client's own helper knows no other end
            with client.responses.stream(**asked) as stream:
                assert stream.get_final_response().output_text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].response.status == whole.status
    return whole


@pytest.mark.parametrize("fields", [{}, {"instructions": "Be brief."}, {"metadata": {"a": "b"}}])
def test_streamed_equals_whole(live: Live, fields):
    response = both_ways(live, input="Hello", max_output_tokens=12, **fields)
    assert response.output_text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.metadata == fields.get("metadata", {})


def test_a_conversation_counts_all_its_items(live: Live):
    one = both_ways(live, input="Hello", max_output_tokens=4)
    again = [{"role": "user", "content": "Hello"}, *(item.to_dict() for item in one.output), {"role": "user", "content": "More"}]
    assert both_ways(live, input=again, max_output_tokens=4).usage.input_tokens > one.usage.input_tokens


def test_a_failure_ends_the_stream_with_what_there_is(live: Live):
    live.engine.step_s, before = 0.02, live.engine.step_s
    try:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            stream = iter(client.responses.create(model="m", input="Hello", max_output_tokens=400, temperature=0, stream=True))
            assert any(event.type == "response.output_text.delta" for event in stream)
            failure = RequestFailed("a step failed")
            live.on_loop(lambda: [live.engine.end(each, FinishReason.ERROR, failure) for each in list(live.engine.streams)])
            *_, last = stream
    finally:
        live.engine.step_s = before
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "a step failed")
    (item,) = last.response.output
    assert (item.status, bool(item.content[0].text)) == ("incomplete", True)


@pytest.mark.parametrize("text", [None, {}, {"verbosity": "medium"}])
def test_the_format_is_told_also_where_none_was_asked_for(live: Live, text):
    body = live.post("/v1/responses", input="a", max_output_tokens=1, text=text).json()
    assert body["text"] == {"format": {"type": "text"}, **(text or {})}


def test_a_schema_is_obeyed(real: Live):
    jsonschema.validate(json.loads(both_ways(real, input="Where?", text=FORMAT, max_output_tokens=100).output_text), SCHEMA)


def test_tools_are_called_and_answered(real: Live):
    asked = {"input": "Hello", "tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}
    response = both_ways(real, **asked, max_output_tokens=100)
    (call,) = response.output
    assert (response.status, call.type, call.name) == ("completed", "function_call", "get_weather")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    turns = [{"role": "user", "content": "Hello"}, call.to_dict()]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    assert both_ways(real, input=turns, tools=[TOOL], max_output_tokens=4).usage.input_tokens > response.usage.input_tokens


def test_items_come_back_as_the_client_dumps_them(real: Live):
    call = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    for asked in ({"max_output_tokens": 4}, call):
        (item,) = both_ways(real, input="Hello", **asked).output
        for dumped in (item.to_dict(), item.model_dump(by_alias=True)):
            turns = [{"role": "user", "content": "Hello"}, dumped]
            assert real.post("/v1/responses", input=turns, max_output_tokens=1).status_code == 200


def test_what_the_assistant_thought_said_and_called_is_one_turn():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}
    calls = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "abc"]
    outputs = [{"type": "function_call_output", "call_id": name, "output": [{"type": "input_text", "text": name * 2}]} for name in "ab"]
    items = [
        {"role": "user", "content": "Hello"},
        {**thought, "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Well."},
        *calls[:2], *outputs,
        {**thought, "summary": [{"type": "summary_text", "text": "Again."}]},
        calls[2],
        {"role": "assistant", "content": "So."},
    ]  # fmt: skip
    chat = ResponsesRequest.model_validate({"model": "m", "input": items}).as_chat()
    called = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "abc"]
    assert [message.as_template_input() for message in chat.messages] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": called[:2]},
        {"role": "tool", "content": "aa", "tool_call_id": "a"},
        {"role": "tool", "content": "bb", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "Again.", "tool_calls": called[2:]},
        {"role": "assistant", "content": "So."},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": ""}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    ],
)
def test_refusals_name_the_field(live: Live, fields, param):
    error = refusal_of(live.client.post("/v1/responses", json={"model": "m", "input": "a"} | fields))
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": "none", "summary": None}},
        {"include": []},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"truncation": "disabled", "background": False, "store": False, "service_tier": "auto", "top_logprobs": 0},
    ],
)
def test_what_asks_for_nothing_is_taken(live: Live, fields):
    response = live.client.post("/v1/responses", json={"model": "m", "input": "a", "max_output_tokens": 1} | fields)
    assert response.status_code == 200, response.text


def test_reasoning_may_be_asked_for_as_clients_do_where_nothing_is_stored(live: Live):
    """The official client's tool runner always asks so, and it is what the answer holds anyhow."""
    fields = {"input": "a", "max_output_tokens": 1, "store": False}
    assert live.post("/v1/responses", **fields, include=["reasoning.encrypted_content"]).status_code == 200
    error = refusal_of(live.post("/v1/responses", **fields, include=["message.output_text.logprobs"]))
    assert (error["param"], error["code"]) == ("include", "unsupported_parameter")


def test_a_refusal_has_the_names_of_the_fields_here(live: Live):
    error = refusal_of(live.post("/v1/responses", input="a", max_output_tokens=600))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "max_output_tokens is 600" in error["message"]
    assert error["message"].endswith("lower max_output_tokens.")
    text = {"format": {"type": "json_schema", "name": "a" * 65, "schema": {}}}
    assert refusal_of(live.post("/v1/responses", input="a", text=text))["param"] == "text.format.name"
    error = refusal_of(live.post("/v1/responses", input="refuse me"))
    assert (error["param"], error["message"]) == ("input", "the template refuses this conversation")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field_here(real: Live, stream):
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}}
    error = refusal_of(real.client.post("/v1/responses", json={"model": "m", "input": "a", "text": text, "stream": stream}))
    assert (error["param"], error["code"]) == ("text.format", "invalid_constraint")
    assert error["message"] == "text.format can't be compiled: Invalid type: nonsense"
