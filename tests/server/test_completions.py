"""POST /v1/completions: streamed equals whole, layout, usage, echo, logprobs, stops."""

from __future__ import annotations

from typing import Any

import pytest

from pagestream.server.responses import Completion
from tests.server.conftest import Live, counts, events_of
from tests.server.fake_engine import EOS, PIECES

PROMPTS = [
    "The capital of France is",
    "def f(n):\n    ",
    "今天天气很好",
    "مرحبا",
    "👩‍👩‍👧‍👦 👍🏽",
    "e\u0301a\u0308",
    "\t" * 20,
    "\n" * 100,
    " \u00a0\u2003\u2028\x85",
    '"\\"',
]
GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a client puts together from chunks, in the shape of a whole answer's."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        assert Completion.model_validate(events[0])
        mine = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": None})
        assert mine["finish_reason"] is None, f"something for index {choice['index']} after its end"
        mine["text"] += choice["text"]
        mine |= {
            name: choice[name] for name in ("finish_reason", "stop_reason", "prompt_logprobs") if choice.get(name) is not None
        }
        if choice["logprobs"] is not None:
            assert len({len(choice["logprobs"][name]) for name in LISTS}) == 1
            mine["logprobs"] = mine["logprobs"] or {name: [] for name in LISTS}
            for name in LISTS:
                mine["logprobs"][name] += choice["logprobs"][name]
        if mine["finish_reason"] is not None:
            mine["stop_reason"] = choice["stop_reason"]
    return [found[index] for index in sorted(found)]


def both_ways(live: Live, **fields: Any) -> dict[str, Any]:
    """The whole answer, after checking that the streamed one comes to the same."""
    whole = live.complete(**fields)
    assert whole.status_code == 200, whole.text
    body = whole.json()
    Completion.model_validate(body)
    events = events_of(live.complete(**fields, stream=True, stream_options={"include_usage": True}))
    for event in events:
        Completion.model_validate(event)
    assert folded(events) == body["choices"]
    assert counts(events[-1]["usage"]) == counts(body["usage"])
    constants = {(event["id"], event["created"], event["model"], event["object"]) for event in events}
    assert len(constants) == 1
    assert body["object"] == "text_completion"
    return body


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_text_equals_whole_text(live: Live, prompt):
    body = both_ways(live, prompt=prompt, **GREEDY)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 48


def test_chunks_are_the_bytes_that_clients_expect(live: Live):
    response = live.complete(prompt="Hello", max_tokens=2, seed=1, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    response.content.decode("ascii")
    first = events_of(response)[0]
    assert list(first) == ["id", "object", "created", "model", "system_fingerprint", "choices"]
    assert set(first["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert first["id"].startswith("cmpl-")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_not_sent_unasked(live: Live, options):
    events = events_of(live.complete(prompt="Hello", **GREEDY, stream=True, stream_options=options))
    assert all(event["choices"] and "usage" not in event for event in events)


def test_the_usage_chunk_is_the_last_before_done(live: Live):
    *chunks, last = events_of(live.complete(prompt="Hello", **GREEDY, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == live.complete(prompt="Hello", **GREEDY).json()["usage"]
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 48,
        "total_tokens": 53,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_continuous_usage_never_falls_and_ends_equal(live: Live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(
        live.complete(
            prompt=["Hello", "Another"], n=2, max_tokens=12, seed=3, ignore_eos=True, stream=True, stream_options=options
        )
    )
    told = [counts(event["usage"]) for event in events]
    assert all(a <= b for first, second in zip(told, told[1:], strict=False) for a, b in zip(first, second, strict=True))
    assert told[-1] == [12, 48, 60]


def test_choices_of_a_batch_are_laid_out_by_prompt(live: Live):
    batch = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    together = both_ways(live, prompt=["One", "Twenty"], **batch)
    alone = [live.complete(prompt=prompt, **batch).json() for prompt in ("One", "Twenty")]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in together["choices"]] == [choice["text"] for body in alone for choice in body["choices"]]
    assert len({choice["text"] for choice in together["choices"]}) == 6
    assert together["usage"]["prompt_tokens"] == len("One") + len("Twenty")


def test_each_index_has_one_finish_reason_on_its_last_chunk(live: Live):
    fields = {"prompt": ["One", "Two"], "n": 3, "seed": 5, "temperature": 1, "max_tokens": 60}
    events = events_of(live.complete(**fields, stream=True))
    reasons: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert sorted(reasons) == [0, 1, 2, 3, 4, 5]
    for *before, last in reasons.values():
        assert last in ("stop", "length")
        assert set(before) <= {None}
    assert {last for *_, last in reasons.values()} == {"stop", "length"}, (
        "the seed is chosen so that some answers end by themselves"
    )


@pytest.mark.parametrize("shape", ["text", "texts", "ids", "lists of ids"])
def test_every_shape_of_prompt_is_the_same_prompt(live: Live, shape):
    ids = list(b"Hello there")
    prompt = {"text": "Hello there", "texts": ["Hello there"], "ids": ids, "lists of ids": [ids]}[shape]
    assert (
        live.complete(prompt=prompt, **GREEDY).json()["choices"]
        == live.complete(prompt="Hello there", **GREEDY).json()["choices"]
    )


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_sixteen_tokens_where_nothing_is_said(live: Live, fields):
    assert live.complete(prompt="The sky", ignore_eos=True, **fields).json()["usage"]["completion_tokens"] == 16


def test_no_tokens_where_none_are_wanted(live: Live):
    body = both_ways(live, prompt="The sky", max_tokens=0)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (
        "",
        "length",
        0,
    )


def test_a_prompt_can_be_scored_without_an_answer(live: Live):
    body = both_ways(live, prompt="The sky", max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == "The sky"
    assert choice["logprobs"]["tokens"] == list("The sky")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"][1:])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
def test_echo_and_logprobs_agree_about_every_token(live: Live, prompt, n):
    body = both_ways(live, prompt=prompt, n=n, seed=4, max_tokens=24, ignore_eos=True, echo=True, logprobs=3)
    for choice in body["choices"]:
        text, logprobs = choice["text"], choice["logprobs"]
        assert text.startswith(prompt)
        assert len(logprobs["tokens"]) == body["usage"]["prompt_tokens"] + 24
        assert "".join(logprobs["tokens"]) == text.removesuffix("\ufffd")
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert text[at : at + len(token)] == token
        assert logprobs["token_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
            assert token in top
            assert len(top) <= 4


def test_echo_of_token_ids_is_their_text(live: Live):
    body = both_ways(live, prompt=list("né".encode()), max_tokens=1, echo=True, seed=1)
    assert body["choices"][0]["text"].startswith("né")


def test_logprobs_0_has_the_chosen_token_alone(live: Live):
    top = both_ways(live, prompt="Hello", max_tokens=6, logprobs=0, seed=1)["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(entry) == 1 for entry in top)


def test_prompt_logprobs_have_one_entry_per_prompt_token(live: Live):
    choice = both_ways(live, prompt="Hello", max_tokens=2, prompt_logprobs=2, seed=1)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == 4
    assert rest[0][str(ord("e"))] == {"logprob": pytest.approx(-0.251), "rank": 1, "decoded_token": "e"}
    assert choice["logprobs"] is None


def test_a_stop_string_is_cut_wherever_it_lies(live: Live):
    fields = {"prompt": "The history begins", **GREEDY}
    text = live.complete(**fields).json()["choices"][0]["text"]
    for start in range(0, len(text) - 12, 31):
        for length in (2, 5, 12):
            stop = text[start : start + length]
            for kept in (False, True):
                choice = both_ways(live, **fields, stop=[stop], include_stop_str_in_output=kept)["choices"][0]
                assert choice["text"] == text[: text.find(stop)] + stop * kept
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_stop_token_ends_the_answer(live: Live):
    token_id = 257 + PIECES.index(".")
    choice = both_ways(live, prompt="Hello", stop_token_ids=[token_id], logit_bias={str(token_id): 100})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


def test_the_models_own_end_has_the_reason_stop(live: Live):
    choice = both_ways(live, prompt="Hello", logit_bias={str(EOS): 100})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", None, "")


def test_every_served_name_answers_under_itself(live: Live):
    assert (
        live.client.post("/v1/completions", json={"model": "other/name", "prompt": "a", "max_tokens": 1}).json()["model"]
        == "other/name"
    )
