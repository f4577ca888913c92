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
from pagestream.server.tools.reply import CallReader, ReplyReader, as_message
from pagestream.server.tools.syntax import SYNTAXES
from tests.server.conftest import Live, events_of, refusal_of, running, served, served_model
from tests.tiny_models import make_checkpoint, make_tokenizer

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


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False},
        {"type": ["null", "object"], "maxProperties": 0},
        {"anyOf": [{"type": "integer"}, {"type": "object", "maxProperties": 0}]},
    ],
)
def test_arguments_are_an_object_whatever_their_schema_leaves_open(live: Live, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(4):
        body = live.chat("Hello", tools=tools, tool_choice="required", parallel_tool_calls=False, **SAMPLED | {"seed": seed}).json()
        text = body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        if body["choices"][0]["finish_reason"] == "tool_calls":
            jsonschema.validate(json.loads(text), {**(parameters or {}), "type": "object"})
        assert text.startswith("{")
        assert parameters is not None or text == "{}"  # what has no parameters is called without arguments


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


def test_calls_are_in_the_prompt_also_where_the_template_shows_none(live: Live):
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": name, "days": 1})}}
        for name in ("Rome", "Oslo")
    ]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Let me see.\n", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "Rome", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "Oslo", "content": "Grey."},
    ]
    tokens = live.post("/tokenize", messages=messages).json()["tokens"]
    prompt = live.post("/detokenize", tokens=tokens).json()["prompt"]
    turn = prompt.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    content, rest = turn[: len("Let me see.\n")], turn[len("Let me see.\n") :]
    assert content == "Let me see.\n"
    # As the model would have written it: what reads answers finds the same calls in it.
    reader = ReplyReader(None, CallReader(SYNTAXES[live.app.state.server.settings.parsers.tool_calls], {"get_weather"}))
    found = as_message(reader.push(rest) + reader.finish())
    assert found["content"] is None
    assert [call["function"] for call in found["tool_calls"]] == [call["function"] for call in calls]


# As many have it: what has another role is left out, or refused.
KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user') %}<u>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<a>{{ m['content'] }}{% else %}OTHER{% endif %}{% endfor %}<a>"
)


@pytest.mark.parametrize("other", ["", "{{ raise_exception('Only user and assistant roles are supported!') }}"])
def test_results_are_in_the_prompt_also_where_the_template_knows_no_such_role(folder: Path, tmp_path: Path, other):
    template = tmp_path / "template.jinja"
    template.write_text(KNOWN_ROLES.replace("OTHER", other))
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "b", "content": "Grey."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "So?"},
    ]
    with served_model(folder, chat_template=str(template)) as live:
        tokens = live.post("/tokenize", messages=messages).json()["tokens"]
        prompt = live.post("/detokenize", tokens=tokens).json()["prompt"]
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    results = "<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nGrey.\n</tool_response>"
    assert prompt == f"<u>Hello<a>{call}\n{call}<u>{results}\nAnd?<a>Well.<u>So?<a>"


def test_the_official_client_reads_calls(live: Live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
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
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["null"]}}}]}, "tools[0].function.parameters"),
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
    assert response.status_code == 200, response.text


SCHEMA = {"type": "object", "properties": {"mood": {"enum": ["::= fine", "bad"]}}, "required": ["mood"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}


def test_an_answer_is_a_call_or_else_what_the_response_format_asks_for(live: Live):
    kinds = set()
    for seed in range(24):
        fields = {"tools": TOOLS, "response_format": FORMAT, "temperature": 1, "seed": seed, "max_tokens": 250}
        # Llama's calls and this format's objects differ in the letter after the first quotation mark alone.
        (token_id,) = live.engine.tokenizer.encode("mn"[seed % 2], False)
        fields["logit_bias"] = {str(token_id): 100}
        response = live.chat("Hello", **fields, parallel_tool_calls=False)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in message else "stop")
        kinds.add(choice["finish_reason"])
        if "tool_calls" in message:
            assert message["content"] is None
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, WEATHER if call["function"]["name"] == "get_weather" else {"type": "object"})
        else:
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
        if seed < 4:
            events = events_of(live.chat("Hello", **fields, parallel_tool_calls=False, stream=True))
            assert folded(events) == [call["function"] for call in message.get("tool_calls", [])]
    assert kinds == {"tool_calls", "stop"}, "the language has both"


def test_a_forced_call_goes_before_the_response_format(live: Live):
    body = live.chat("Hello", tools=TOOLS, tool_choice=NAMED, response_format=FORMAT, **SAMPLED).json()
    (call,) = body["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_calls_that_begin_with_a_special_token_are_constrained_too(tmp_path: Path):
    folder = make_checkpoint("llama", tmp_path / "mistral", max_position_embeddings=2048)
    make_tokenizer(folder, specials=["[TOOL_CALLS]"])
    metrics = Metrics("m")
    args = EngineArgs(model=str(folder), num_kv_blocks=256, max_num_seqs=8, device="cpu", cpu_threads=1)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics, parsers=Parsers("mistral")) as live:
        (token_id,) = live.engine.tokenizer.encode("[TOOL_CALLS]", False)
        for fields in ({"tools": strict}, {"tools": TOOLS[:1], "response_format": FORMAT}):
            # The tiny model would never choose it by itself.
            body = live.chat("Hello", **fields, **SAMPLED, parallel_tool_calls=False, logit_bias={str(token_id): 100}).json()
            (choice,) = body["choices"]
            assert choice["finish_reason"] == "tool_calls", body
            (call,) = choice["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
