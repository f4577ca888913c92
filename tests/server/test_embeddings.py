"""POST /v1/embeddings: shapes in, shapes out, refusals; and the real engine behind it."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pagestream.server.embeddings import INPUTS_AT_ONCE, MAX_INPUTS
from tests.server.conftest import Live, refusal_of, served_model


def embed(live: Live, inputs, **fields) -> list:
    response = live.post("/v1/embeddings", input=inputs, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"]) == ("list", "m")
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    assert {entry["object"] for entry in body["data"]} == {"embedding"}
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    return [entry["embedding"] for entry in body["data"]]


def test_every_shape_of_input(live):
    (text,) = embed(live, "Hello")
    assert embed(live, ["Hello"]) == [text]
    assert embed(live, list(b"Hello")) == [text]
    assert embed(live, [list(b"Hello"), list(b"World")]) == embed(live, ["Hello", "World"]) != [text, text]


def test_more_inputs_than_are_computed_at_once_keep_their_order(live):
    texts = [f"text {number}" for number in range(2 * INPUTS_AT_ONCE + 3)]
    found = embed(live, texts)
    assert found[70] == embed(live, texts[70])[0]
    assert len({tuple(embedding) for embedding in found}) == len(texts)


def test_base64_holds_the_same_numbers(live):
    numbers = embed(live, ["Hello", "World"])
    for written, expected in zip(embed(live, ["Hello", "World"], encoding_format="base64"), numbers, strict=True):
        raw = base64.b64decode(written)
        assert raw == struct.pack(f"<{len(expected)}f", *expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["ok", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "x" * 600}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "timeout_s": 0}, "timeout_s"),
        ({"input": "a", "inptu": "b"}, "inptu"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"input": [[1]] * (INPUTS_AT_ONCE + 1) + [[10**6]]}, f"input[{INPUTS_AT_ONCE + 1}]"),
        ({"input": [[1]] * INPUTS_AT_ONCE + [[10**6]]}, f"input[{INPUTS_AT_ONCE}]"),
        ({"input": [[10**6]]}, "input"),
    ],
)
def test_refusals_name_the_field(live, fields, param):
    assert refusal_of(live.post("/v1/embeddings", **fields))["param"] == param


def test_what_is_too_long_is_told_by_its_place_and_without_what_was_not_asked(real):
    error = refusal_of(real.post("/v1/embeddings", input=["a", "the fox " * 2000]))
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert re.fullmatch(r"input\[1\] has \d+ tokens; the model's context length is \d+ tokens\. Shorten it\.", error["message"])


def test_unknown_model(live):
    response = live.client.post("/v1/embeddings", json={"model": "nope", "input": "a"})
    assert refusal_of(response, 404)["code"] == "model_not_found"


def test_a_client_that_leaves_ends_its_requests(start):
    live = start({"max_num_seqs": 1}, max_requests_per_key=1)
    live.engine.is_paused = True
    sock = live.connect({"input": ["a", "b"]}, "/v1/embeddings")
    live.until(lambda: len(live.engine.streams) == 2, "admitted")
    assert refusal_of(live.post("/v1/embeddings", input="a"), 429)["code"] == "rate_limit_exceeded"
    sock.close()
    live.until(lambda: not live.engine.streams, "aborted")
    live.engine.is_paused = False
    assert embed(live, "a")  # the lease was given back


def test_a_full_queue_is_told_at_once(start):
    live = start({"max_num_seqs": 1, "max_num_queued": 1})
    live.engine.is_paused = True
    with live.connect({"prompt": ["a", "b"]}):
        live.until(lambda: len(live.engine.streams) == 2, "admitted")
        response = live.post("/v1/embeddings", input=["a", "b", "c"])
        assert refusal_of(response, 429)["code"] == "server_overloaded"
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("places", [(1, 0), (1, 1), (3, 4)])
def test_more_inputs_than_there_are_places_are_worked_off(start, places):
    live = start({"max_num_seqs": places[0], "max_num_queued": places[1]})
    texts = [f"text {number}" for number in range(40)]
    assert embed(live, texts)[33] == embed(live, texts[33])[0]


@pytest.mark.parametrize(("timeout_s", "status"), [(60, 200), (0.5, 408)])
def test_who_has_begun_waits_for_room_until_the_deadline(start, timeout_s, status):
    live = start({"max_num_seqs": 1, "max_num_queued": 1})
    engine = live.engine
    engine.is_paused = True
    with live.connect({"input": ["a", "b"], "timeout_s": timeout_s}, "/v1/embeddings") as sock:
        live.until(lambda: len(engine.streams) == 1, "the first input is admitted")
        with live.connect({"prompt": "long", "max_tokens": 1}):
            live.until(lambda: len(engine.streams) == 2, "somebody else is admitted")
            engine.max_num_queued = 0  # who has the only place
            live.on_loop(engine.streams[0].step)
            engine.is_paused = status == 408
            assert sock.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())
            engine.is_paused = False


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[Live]:
    with served_model(tiny_llama, max_num_seqs=16) as live:
        yield live


def test_the_official_client_reads_both_encodings(real):
    client = openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
    texts = ["the quick brown fox", "jumps over", "the lazy dog"]
    as_base64 = client.embeddings.create(model="m", input=texts)  # what it asks for by itself
    as_float = client.embeddings.create(model="m", input=texts, encoding_format="float")
    assert as_base64.usage.prompt_tokens == as_float.usage.total_tokens > 0
    for first, second in zip(as_base64.data, as_float.data, strict=True):
        assert len(second.embedding) == 64
        assert list(first.embedding) == pytest.approx(second.embedding, abs=1e-8)
        assert sum(number * number for number in second.embedding) == pytest.approx(1, abs=1e-6)


def test_poolings_differ_and_do_not_depend_on_company(real):
    texts = [f"the morning comes {'again ' * number}" for number in range(40)]
    mean, last = embed(real, texts), embed(real, texts, pooling="last")
    assert all(first != second for first, second in zip(mean[1:], last[1:], strict=True))
    assert mean[5] == embed(real, texts[5])[0]
    assert last[5] == embed(real, texts[5], pooling="last")[0]


def test_a_deadline_that_can_not_be_met_is_refused_early_or_ends_the_work(real):
    response = real.post("/v1/embeddings", input=["the forest " * 60] * 1000, timeout_s=0.02)
    # Where the pace of earlier requests shows that there is no hope, at once; else when the time is over.
    hopeless = response.status_code == 429
    refusal = refusal_of(response, 429 if hopeless else 408)
    assert refusal["code"] == ("server_overloaded" if hopeless else "deadline_exceeded")
    assert hopeless or refusal["message"].endswith("timeout_s, which is 0.02")
    real.until(lambda: real.metric("vllm:num_requests_running") == 0, "idle")
