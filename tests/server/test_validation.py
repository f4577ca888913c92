"""Refusals of fields, each by name, before anything is admitted, in the one envelope."""

from __future__ import annotations

import pytest

from tests.server.conftest import Live, refusal_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURN = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["ok", ""], [[1, 2], []], None, 7, {"text": "a"}, True])
def test_an_empty_or_shapeless_prompt_is_refused(live: Live, prompt):
    assert refusal_of(live.complete(prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_what_is_left_out_is_asked_for(live: Live, path, param):
    error = refusal_of(live.post(path, max_tokens=1))
    assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    "prompt",
    [[1, 100_000], [-1], [[1, 2], [99999999999]], [True, False], [1.5], [1, "a"], [[1], "a"], [["a"]], ["a", 1], [[[1]]]],
)
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_that_are_none_are_refused(live: Live, prompt, stream):
    place = "prompt[1]" if prompt == [[1, 2], [99999999999]] else "prompt"
    assert refusal_of(live.complete(prompt=prompt, stream=stream))["param"] == place


def test_the_number_of_prompts_is_bounded(live: Live):
    assert refusal_of(live.complete(prompt=["a"] * 257))["param"] == "prompt"


BAD_VALUES = {
    "seed": [2**64, "x", 1.5],
    "temperature": [-1, 2.01, "hot", True],
    "top_p": [1.01, -0.1],
    "top_k": [0.01, -2, 10**400],
    "min_p": [1.5],
    "n": [0, -1, 1_000_000, 1.5, True],
    "max_tokens": [-1, "5", 5.0, 10**30],
    "min_tokens": [-1],
    "repetition_penalty": [0],
    "presence_penalty": [2.5, 10**400],
    "frequency_penalty": [-3],
    "stop": [5, [""], "", ["a"] * 17, [1], "a" * 2000],
    "stop_token_ids": [[-1], ["a"], 5],
    "logit_bias": [{"1": 101}, {"a": 1}, {"-1": 1}, [1], {"1": "x"}],
    "allowed_token_ids": [[], [-1]],
    "prompt_logprobs": [21, True],
    "ignore_eos": [1, "yes"],
    "stream": ["yes", 1],
    "stream_options": [True],
    "user": [5],
    "truncate_prompt_tokens": [0],
    "priority": ["high"],
    "cache_salt": ["", 5],
    "skip_special_tokens": [0],
    "add_special_tokens": ["no"],
    "include_stop_str_in_output": [1],
    "model": [None, 5],
    "x_fault": [{"kind": "nonsense"}, {}],
}
SHARED = [(field, value) for field, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(("field", "value"), SHARED, ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_value_out_of_range_is_refused_by_name(live: Live, kind, field, value):
    fields = {"stream": True} if field == "stream_options" else {}
    fields[field] = value
    response = live.complete(**{"prompt": "a", **fields}) if kind == "completions" else live.chat(**fields)
    param = refusal_of(response)["param"]
    assert param is not None
    assert param.split(".")[0].split("[")[0] == field


@pytest.mark.parametrize(
    ("field", "value"), [("echo", 1), ("echo", "true"), ("logprobs", True), ("logprobs", 21), ("logprobs", -1), ("best_of", 0)]
)
def test_a_completions_field_out_of_range_is_refused_by_name(live: Live, field, value):
    assert refusal_of(live.complete(prompt="a", **{field: value}))["param"] == field


BAD_MESSAGES = [
    [],
    None,
    "hi",
    ["hi"],
    [{"role": "user"}],
    [{"role": "nobody", "content": "a"}],
    [{"content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "a", "colour": "red"}],
    [{"role": "user", "content": "refuse me"}],
]
CHAT_ONLY = [
    *(("messages", messages) for messages in BAD_MESSAGES),
    ("logprobs", 1),
    ("top_logprobs", 21),
    ("max_completion_tokens", -1),
    ("add_generation_prompt", "yes"),
    ("continue_final_message", 1),
    ("continue_final_message", True),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"tools": []}),
]


@pytest.mark.parametrize(("field", "value"), CHAT_ONLY, ids=lambda value: repr(value)[:40])
def test_a_chat_field_out_of_range_is_refused_by_name(live: Live, field, value):
    param = refusal_of(live.chat(**{field: value}))["param"]
    assert param is not None
    assert param.split(".")[0].split("[")[0] == field


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize(
    ("typo", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("Stream", "stream"), ("top-p", "top_p")]
)
def test_a_misspelt_field_is_reported_with_its_likeliest_name(live: Live, kind, typo, meant):
    fields = {typo: 1, "temperature": 5}  # the typo goes before other faults
    error = refusal_of(live.complete(prompt="a", **fields) if kind == "completions" else live.chat(**fields))
    assert (error["param"], error["code"]) == (typo, "unknown_parameter")
    assert f"did you mean {meant!r}" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "hint"),
    [
        (COMPLETIONS, "max_completion_tokens", "did you mean 'max_tokens'?"),
        (COMPLETIONS, "stop_sequences", "did you mean 'stop'?"),
        (COMPLETIONS, "messages", f"{CHAT} takes it"),
        (CHAT, "prompt", f"{COMPLETIONS} takes it"),
        ("/v1/messages", "stop", "did you mean 'stop_sequences'?"),
        ("/v1/responses", "max_tokens", "did you mean 'max_output_tokens'?"),
        ("/v1/responses", "messages", "input takes it"),
        ("/v1/responses", "response_format", "text.format takes it"),
        ("/v1/responses", "top_k", f"{CHAT} takes it"),
        (COMPLETIONS, "system", ""),  # is spelt much like stream, and means something else
        (COMPLETIONS, "cache_control", ""),
    ],
)
def test_an_unknown_field_is_reported_with_what_is_meant_by_it_or_nothing(live: Live, path, field, hint):
    message = refusal_of(live.post(path, **{field: "a"}))["message"]
    assert message == f"unknown field {field!r}" + (f"; {hint}" if hint else "")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"messages": []}, "messages must not be empty"),
        (CHAT, {"messages": "hi"}, 'messages must be an array, not "hi"'),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or an array, not 5"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
        (CHAT, {"messages": TURN, "chat_template_kwargs": 5}, "chat_template_kwargs must be an object, not 5"),
        (CHAT, {"messages": TURN, "top_logprobs": 1.5}, "top_logprobs must be an integer, not 1.5"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, "bad_words[0] must not be empty"),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * 65}, "bad_words must hold at most 64 entries, not 65"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "a" * 257}, "cache_salt must hold at most 256 characters, not 257"),
        ("/v1/responses", {"input": ""}, "input must not be empty"),
        ("/v1/responses", {"input": []}, "input must not be empty"),
        ("/v1/responses", {"input": 5}, "input must be a string or an array, not 5"),
        ("/v1/responses", {"input": [5]}, "input[0] must be an object, not 5"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [5]}], "max_tokens": 1}, "messages[0].content[0] must be an object, not 5"),
        (
            "/v1/messages", {"messages": [{"role": "user", "content": [{"text": "a"}]}], "max_tokens": 1},
            "messages[0].content[0].type is required",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages[0].audio must be null, not an object"),
        # A kind that isn't served has fields of its own, which are no misspellings.
        (
            CHAT, {"messages": TURN, "tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools[0].type must be 'function', not \"custom\"",
        ),
        (
            "/v1/responses", {"input": "a", "tools": [{"type": "mcp", "server_label": "a"}]},
            "tools[0].type must be 'function', not \"mcp\"",
        ),
        (
            CHAT, {"messages": TURN, "response_format": {"type": "regex", "pattern": "a"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema', not \"regex\"",
        ),
        (
            "/v1/messages", {"messages": TURN, "max_tokens": 1, "tools": [{"name": "f f", "input_schema": {}}]},
            'tools[0].name must match ^[a-zA-Z0-9_.\\-]{1,64}$, which "f f" does not',
        ),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_taken_in_words_of_json(live: Live, path, fields, message):
    assert refusal_of(live.post(path, **fields))["message"] == message


UNSUPPORTED = [
    ("suffix", "x"),
    ("guided_json", {}),
]
UNSUPPORTED_IN_CHAT = [
    ("functions", [{}]),
    ("audio", {}),
    ("modalities", ["text", "audio"]),
    ("prediction", {}),
    ("reasoning_effort", "high"),
    ("store", True),
    ("web_search_options", {}),
    ("metadata", {"a": "b"}),
    ("service_tier", "priority"),
    ("verbosity", "low"),
]


@pytest.mark.parametrize(
    ("path", "field", "place"),
    [
        (COMPLETIONS, "guided_choice", "structured_outputs.choice"),
        (CHAT, "guided_json", "structured_outputs.json"),
        (CHAT, "functions", "tools"),
        ("/v1/messages", "output_format", "output_config.format"),
    ],
)
def test_what_has_another_place_is_told_it(live: Live, path, field, place):
    error = refusal_of(live.post(path, **{field: {"a": 1}}))
    assert (error["message"], error["code"]) == (f"{field} is not supported yet; {place} takes it", "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_is_refused_by_name(live: Live, stream):
    for field, value in UNSUPPORTED + UNSUPPORTED_IN_CHAT:
        error = (
            refusal_of(live.chat(**{field: value}, stream=stream))
            if field != "suffix"
            else refusal_of(live.complete(prompt="a", suffix=value))
        )
        assert (error["param"], error["code"]) == (field, "unsupported_parameter"), error
        assert "not supported" in error["message"]


def test_what_asks_for_nothing_is_taken(live: Live):
    nothing = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "prompt_cache_key": "a session",
        "top_logprobs": 0,
        "metadata": {},
        "verbosity": "medium",
    }
    assert (
        live.chat(
            max_tokens=1, **nothing, temperature=None, n=None, stop=None, stream=None, logit_bias=None, user="me"
        ).status_code
        == 200
    )
    assert (
        live.complete(
            prompt="a", max_tokens=1, suffix="", best_of=None, echo=None, logprobs=None, stream_options=None, user=None
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "nonsense"}}, "response_format.type"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"resumes": True}}, "stream_options.resumes"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"use_beam_search": True, "temperature": 0}, "use_beam_search"),
        ({"use_beam_search": True, "n": 2}, "temperature"),
        ({"use_beam_search": True, "n": 2, "temperature": 0, "response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"use_beam_search": True, "n": 2, "temperature": 0, "stop": "x"}, "stop"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"early_stopping": "true", "use_beam_search": True, "n": 2, "temperature": 0}, "early_stopping"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(live: Live, fields, param):
    assert refusal_of(live.complete(prompt="a", **fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_chat_fields_that_contradict_each_other_are_refused(live: Live, fields, param):
    assert refusal_of(live.chat(**fields))["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_has_an_exact_end(live: Live, stream):
    limit = live.engine.max_model_len
    assert live.complete(prompt=[65] * (limit - 1), max_tokens=1, stream=stream).status_code == 200
    for length in (limit, limit + 1):
        error = refusal_of(live.complete(prompt=[65] * length, max_tokens=1, stream=stream))
        assert error["code"] == "context_length_exceeded"
        assert all(str(number) in error["message"] for number in (length, 1, limit))
    error = refusal_of(live.complete(prompt=[65] * (limit - 10), max_tokens=11, stream=stream))  # not silently fewer
    assert error["code"] == "context_length_exceeded"
    assert live.complete(prompt=[65] * (limit - 10), max_tokens=10, stream=stream).status_code == 200


def test_a_prompt_can_be_cut_to_its_end(live: Live):
    long = [65] * live.engine.max_model_len
    assert live.complete(prompt=long, max_tokens=1, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_404(live: Live, path):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = refusal_of(live.client.post(path, json={"model": "nope" * 1000, **body}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/complete", 404),
        ("GET", "/v1/models/nope", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("BREW", COMPLETIONS, 405),
    ],
)
def test_wrong_paths_and_methods_get_the_envelope(live: Live, method, path, status):
    response = live.client.request(method, path, json={} if method == "POST" else None)
    refusal_of(response, status)
    if status == 405:
        assert response.headers["allow"] in ("POST", "GET")


@pytest.mark.parametrize("huge", ["x" * 100_000, "\u2603" * 50_000, "\x00\x1b" * 10_000])
def test_a_refusal_is_short_whatever_came_in(live: Live, huge):
    for fields in (
        {huge: 1},
        {"temperature": huge},
        {"user": [huge]},
        {"model": huge},
        {"logit_bias": {huge: 1}},
        {"x_fault": {huge: huge}},
    ):
        refusal_of(live.complete(prompt="a", **fields), 404 if "model" in fields else 400)
    refusal_of(live.chat(messages=[{"role": huge, "content": "a", huge: "b"}]))


def test_faults_are_injected_only_where_the_server_was_started_for_it(start):
    server = start({"allows_faults": False})
    assert refusal_of(server.complete(prompt="a", x_fault={"kind": "raise"}))["param"] == "x_fault"


F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "messages[1].content"),
        (CHAT, {"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ("/v1/messages", {"system": 5}, "system"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ("/v1/responses", {"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ],
)
def test_a_field_of_several_kinds_is_refused_by_its_place_in_the_body(live: Live, path, fields, param):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} if path != "/v1/responses" else {}
    error = refusal_of(live.post(path, **body | fields))
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_refusals_admit_nothing(live: Live):
    assert live.on_loop(lambda: list(live.engine.streams)) == []
