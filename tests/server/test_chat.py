"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import pytest

from pagestream.server.responses import ChatCompletion, ChatCompletionChunk
from tests.server.conftest import Live, counts, events_of, refusal_of
from tests.server.fake_engine import EOS

GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            if index not in found:
                assert delta == {"role": "assistant", "content": ""}, "the role comes once, first"
                found[index] = {"index": index, "content": "", "logprobs": [], "finish_reason": None}
            else:
                assert "role" not in delta
            mine = found[index]
            assert mine["finish_reason"] is None
            mine["content"] += delta.get("content", "")
            mine["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            mine["finish_reason"] = choice["finish_reason"]
            if choice["finish_reason"] is not None:
                assert delta == {}, "the end has a chunk of its own"
    return [found[index] for index in sorted(found)]


def both_ways(live: Live, **fields: Any) -> dict[str, Any]:
    whole = live.chat(**fields)
    assert whole.status_code == 200, whole.text
    body = whole.json()
    ChatCompletion.model_validate(body)
    events = events_of(live.chat(**fields, stream=True, stream_options={"include_usage": True}))
    expected = [
        {
            "index": choice["index"],
            "content": choice["message"]["content"],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]
    assert folded(events) == expected
    assert counts(events[-1]["usage"]) == counts(body["usage"])
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    return body


@pytest.mark.parametrize("text", ["Hello", "今天天气", "👍🏽", '"\\\n'])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_equals_whole(live: Live, text, n):
    body = both_ways(live, text=text, n=n, seed=2, max_tokens=32, ignore_eos=True)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert [choice["index"] for choice in body["choices"]] == list(range(n))
    assert body["usage"]["completion_tokens"] == 32 * n


def test_the_end_of_the_model_is_stop(live: Live):
    assert both_ways(live, logit_bias={str(EOS): 100})["choices"][0]["finish_reason"] == "stop"


def test_logprobs_name_each_token_and_its_rivals(live: Live):
    body = both_ways(live, text="京", **GREEDY, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 32
    assert (
        bytes(byte for entry in content for byte in entry["bytes"])
        .decode("utf-8", "ignore")
        .startswith(body["choices"][0]["message"]["content"].rstrip("\ufffd"))
    )
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert both_ways(live, **GREEDY, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert both_ways(live, **GREEDY)["choices"][0]["logprobs"] is None


def test_the_answer_may_fill_the_context(live: Live):
    body = live.chat("word " * 90, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == live.engine.max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_is_max_tokens(live: Live):
    assert live.chat(max_completion_tokens=5, ignore_eos=True).json()["usage"]["completion_tokens"] == 5


def prompt_size(live: Live, messages: list[dict[str, Any]], **fields: Any) -> int:
    response = live.post("/v1/chat/completions", messages=messages, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


def test_text_parts_are_joined_by_line_breaks(live: Live):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_size(live, [{"role": "user", "content": parts}]) == len("<user>one\ntwo\n<assistant>")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_refusal_names_the_limit_as_the_client_did(live: Live, name):
    error = refusal_of(live.chat(**{name: 600}))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f" {name} is 600," in error["message"]
    assert error["message"].endswith(f" lower {name}.")


@pytest.mark.parametrize(("fields", "rendered"), [
    ({}, "<user>a\n<assistant>b\n<assistant>"),
    ({"add_generation_prompt": False}, "<user>a\n<assistant>b\n"),
    ({"continue_final_message": True}, "<user>a\n<assistant>b"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "<user>a\n<assistant>b"),
])  # fmt: skip
def test_how_the_prompt_ends(live: Live, fields, rendered):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt_size(live, messages, **fields) == len(rendered)


def test_all_roles_and_what_clients_send_back_are_taken(live: Live):
    sent_back = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "parsed": {"a": 1},  # as the official client's parse() leaves it there
    }
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a", "name": "me"},
        sent_back,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'  # in the content, as the template shows no calls
    shown = f"<system>be brief\n<user>a\n<assistant>b\n<assistant>{call}\n<tool>5\n<assistant>"
    assert prompt_size(live, messages) == len(shown)
