"""Tools over the real engine and a tiny checkpoint: it can't choose a tool by itself, but must call those it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from pagestream.server.responses import ChatCompletion, ChatCompletionChunk
from pagestream.server.tools.plan import Parsers
from tests.server.conftest import Live, events_of, refusal_of, running, served
from tests.tiny_models import make_checkpoint

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SAMPLED = {"temperature": 1, "seed": 3, "max_tokens": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the tools' description, which takes many tokens of a tiny vocabulary."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "long", max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral"])
def live(request: pytest.FixtureRequest, folder: Path) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(model=str(folder), num_kv_blocks=256, max_num_seqs=8, device="cpu", cpu_threads=1)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics, parsers=Parsers(request.param)) as server:
        yield server


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of choice 0."""
    calls: list[dict[str, Any]] = []
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            for new in choice["delta"].get("tool_calls", []):
                if new["index"] == len(calls):
                    assert new["id"]
                    assert new["type"] == "function"
                    calls.append({"name": new["function"]["name"], "arguments": ""})
                else:
                    assert "id" not in new
                calls[new["index"]]["arguments"] += new["function"]["arguments"]
    return calls


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_forced_call_fits_its_schema_streamed_and_whole(live: Live, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **SAMPLED}
    body = live.chat("Hello", **fields).json()
    ChatCompletion.model_validate(body)
    (only,) = body["choices"]
    assert (only["finish_reason"], only["message"]["content"]) == ("tool_calls", None)
    (call,) = only["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert choice == "required"
    events = events_of(live.chat("Hello", **fields, stream=True))
    assert folded(events) == [call["function"]]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"


def test_several_answers_each_call(live: Live):
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "n": 3, "temperature": 1, "seed": 5, "max_tokens": 400}
    for choice in live.chat("Hello", **fields).json()["choices"]:
        for call in choice["message"]["tool_calls"][:-1] or choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_calls_and_their_results_come_back_in_a_conversation(live: Live):
    first = live.chat("Hello", tools=TOOLS, tool_choice=NAMED, **SAMPLED).json()["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "Hello"},
        first,
        {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "Sunny."},
    ]
    answer = live.post("/v1/chat/completions", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert answer.status_code == 200, answer.text
    assert "tool_calls" not in answer.json()["choices"][0]["message"]


def test_the_official_client_reads_calls(live: Live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "tool_choice": NAMED, **SAMPLED}
        asked["messages"] = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert final.function.arguments == whole.function.arguments
    assert final.function.name == whole.function.name == "get_weather"


def test_tools_that_the_template_does_not_show_are_described_in_the_prompt(live: Live):
    def size(**fields: Any) -> int:
        return live.chat("Hello", max_tokens=1, **fields).json()["usage"]["prompt_tokens"]

    assert size(tools=TOOLS[1:]) > size() + 40
    assert size(tools=TOOLS, tool_choice="none") == size(tools=[]) == size()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(live: Live, fields, param):
    assert refusal_of(live.chat(**fields))["param"] == param


def test_reasoning_has_a_field_of_its_own():
    # The fake engine knows no <think>, so what it says is content; inside a thought it would all be reasoning.
    with running(parsers=Parsers(reasoning="think")) as live:
        plain = live.chat("Hello", max_tokens=12, temperature=0, ignore_eos=True).json()["choices"][0]["message"]
        messages = [{"role": "assistant", "content": "<think>"}]
        fields = {"messages": messages, "continue_final_message": True, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        body = live.post("/v1/chat/completions", **fields)
        streamed = events_of(live.post("/v1/chat/completions", **fields, stream=True))
    assert plain["content"]
    assert "reasoning_content" not in plain
    message = body.json()["choices"][0]["message"]
    assert message["content"] == ""
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"] != ""


def test_a_strict_tool_limits_what_a_model_may_call_by_itself(live: Live):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    response = live.chat("Hello", tools=strict, temperature=1, seed=2, max_tokens=30)
    if "mistral" in response.text:
        assert refusal_of(response)["param"] == "tools"
    else:
        assert response.status_code == 200, response.text
