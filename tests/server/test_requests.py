"""Ranked answers, timelines and the look-up of requests, over the wire and the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Live, refusal_of, served_model
from tests.server.test_completions import both_ways

BEAMS = {"prompt": "the quick", "use_beam_search": True, "temperature": 0, "n": 2, "best_of": 4, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tiny_llama: Path) -> Iterator[Live]:
    with served_model(tiny_llama, max_num_seqs=16) as server:
        yield server


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"length_penalty": 2.0, "early_stopping": "never"}, {"echo": True}])
def test_beams_are_the_same_streamed_and_whole(live: Live, more):
    body = both_ways(live, **BEAMS, **more)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"] != body["choices"][1]["text"]
    assert body["usage"]["completion_tokens"] == 4 * 30


def test_the_likeliest_answers_are_the_same_streamed_and_whole(live: Live):
    body = both_ways(live, prompt="the quick", temperature=1, seed=3, max_tokens=12, ignore_eos=True, n=2, best_of=4)
    assert body["usage"]["completion_tokens"] == 4 * 12


def chunks_of(live: Live, **fields) -> list[dict]:
    events = live.complete(stream=True, **fields).text.split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]


def test_a_timeline_comes_at_the_end_where_asked_for(live: Live):
    fields = {"prompt": ["the quick", "brown"], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = live.complete(**fields, include_timeline=True).json()
    assert [one["num_steps"] for one in whole["timeline"]] == [5, 5]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *earlier, last = chunks_of(live, **fields, include_timeline=True, **options)
        assert all("timeline" not in chunk for chunk in earlier)
        assert last["choices"] == []
        assert len(last["timeline"]) == 2
        assert ("usage" in last) == bool(options)
    assert "timeline" not in live.complete(**fields).json()
    assert all("timeline" not in chunk for chunk in chunks_of(live, **fields))


def test_a_request_can_be_looked_up_after_its_end(live: Live):
    answer = live.complete(prompt=["the quick", "brown"], max_tokens=5, temperature=0, ignore_eos=True).json()
    found = live.client.get(f"/v1/requests/{answer['id']}")
    assert found.status_code == 200
    body = found.json()
    assert (body["id"], body["object"]) == (answer["id"], "request")
    assert [prompt["status"] for prompt in body["prompts"]] == ["finished", "finished"]
    assert sum(prompt["completion_tokens"] for prompt in body["prompts"]) == answer["usage"]["completion_tokens"]
    missing = live.client.get("/v1/requests/cmpl-nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "request_not_found"


def test_copies_are_counted(live: Live):
    before = live.metric("pagestream:copied_blocks_total")
    live.complete(**BEAMS)
    assert live.metric("pagestream:copied_blocks_total") > before


def test_the_counter_of_tokens_is_the_sum_of_usages(live: Live):
    before = live.metric("vllm:generation_tokens_total")
    usages = [
        live.complete(**fields).json()["usage"]["completion_tokens"]
        for fields in (BEAMS, {"prompt": "the", "max_tokens": 9, "best_of": 3, "seed": 1, "ignore_eos": True})
    ]
    assert live.metric("vllm:generation_tokens_total") - before == sum(usages)


def test_beams_are_for_completions_only(live: Live):
    refused = live.chat(use_beam_search=True)
    assert refusal_of(refused)["param"] == "use_beam_search"
