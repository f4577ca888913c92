"""Streams that outlive their connection, and requests that may be sent twice."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.conftest import Live, counts, refusal_of

STORY = {"prompt": "A long story", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}
SEVERAL = {"prompt": ["One", "Two"], "n": 2, "temperature": 1, "seed": 5, "max_tokens": 12}
RESUMABLE = {"stream": True, "stream_options": {"resumable": True, "include_usage": True}}


def parsed(raw: bytes) -> list[tuple[str, str]]:
    """(id, data) of each whole event."""
    events = []
    for block in raw.split(b"\n\n")[:-1]:
        lines = [line for line in block.decode().split("\n") if not line.startswith(":")]
        assert [line.partition(": ")[0] for line in lines] == ["id", "data"], lines
        events.append((lines[0][4:], lines[1][6:]))
    return events


def read_some(live: Live, fields: dict, number: int) -> list[tuple[str, str]]:
    """At least so many events of a new stream, whose connection then breaks."""
    sock = live.connect({**fields, **RESUMABLE})
    raw = b""
    while raw.count(b"\n\n") < number:
        raw += sock.recv(1 << 16)
    sock.close()
    body = raw.partition(b"\r\n\r\n")[2]
    # Without the sizes of HTTP's chunks.
    data, rest = b"", body
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        data += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return parsed(data)[:number]


def resume(live: Live, stream_id: str, last_id: str | None) -> list[tuple[str, str]]:
    response = live.client.get(f"/v1/streams/{stream_id}", headers={} if last_id is None else {"Last-Event-ID": last_id})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.content)


def told(events: list[tuple[str, str]]) -> tuple[dict[int, list], list]:
    """What each choice was told in its order, and what came for all of them; without what differs between requests."""
    lanes: dict[int, list] = {}
    common = []
    for _, data in events:
        body = {"choices": []} if data == "[DONE]" else json.loads(data)
        for choice in body["choices"]:
            lanes.setdefault(choice["index"], []).append(choice)
        if not body["choices"]:
            common.append(counts(body["usage"]) if "usage" in body else "done")
    return lanes, common


@pytest.mark.parametrize("fields", [STORY, SEVERAL], ids=["one", "several"])
def test_a_cut_stream_goes_on_without_a_token_lost_or_doubled(start, fields):
    live: Live = start({"step_s": 0.002})
    whole = parsed(live.complete(**fields, **RESUMABLE).content)
    for number in (1, 2, 7, 20, len(whole) - 1):
        begun = read_some(live, fields, number)
        rest = resume(live, json.loads(begun[0][1])["id"], begun[-1][0])
        assert told(begun + rest) == told(whole)


def test_a_stream_may_be_cut_twice_and_read_by_two(start):
    live: Live = start({"step_s": 0.005})
    whole = parsed(live.complete(**STORY, **RESUMABLE).content)
    begun = read_some(live, STORY, 3)
    stream_id = json.loads(begun[0][1])["id"]
    with live.client.stream("GET", f"/v1/streams/{stream_id}", headers={"Last-Event-ID": begun[-1][0]}) as response:
        raw = b""
        for piece in response.iter_raw():
            raw += piece
            if raw.count(b"\n\n") >= 4:
                break
    begun += parsed(raw)
    with ThreadPoolExecutor(2) as pool:
        rests = list(pool.map(lambda last: resume(live, stream_id, last), [begun[-1][0], None]))
    assert told(begun + rests[0]) == told(rests[1]) == told(whole)
    assert len(live.engine.ended) == 2


def test_a_stream_that_nobody_comes_back_for_is_ended_after_some_time(start):
    live: Live = start({"step_s": 0.01, "context": 100_000}, stream_resume_timeout_s=1.0)
    begun = read_some(live, {**STORY, "max_tokens": 50_000}, 2)
    assert live.engine.streams
    live.until(lambda: not live.engine.streams, "ended")
    stream_id = json.loads(begun[0][1])["id"]
    assert refusal_of(live.client.get(f"/v1/streams/{stream_id}"), 404)["code"] == "stream_not_found"


def test_a_finished_stream_is_kept_for_some_time(start):
    live: Live = start(stream_keep_s=1.0)
    whole = parsed(live.complete(**STORY, **RESUMABLE).content)
    stream_id = json.loads(whole[0][1])["id"]
    assert resume(live, stream_id, None) == whole
    assert live.client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": whole[-1][0]}).status_code == 204
    time.sleep(1.5)  # nobody reads it meanwhile, which would prolong it
    assert live.client.get(f"/v1/streams/{stream_id}").status_code == 404


@pytest.mark.parametrize("last_id", ["x", "1", "1.2.3", "-1.0", "9999.0", "99999999999999.0", "1.٣"])
def test_an_id_that_no_event_had_is_refused(live: Live, last_id):
    stream_id = json.loads(parsed(live.complete(**STORY, **RESUMABLE).content)[0][1])["id"]
    response = live.client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": last_id.encode()})
    assert refusal_of(response)["param"] == "Last-Event-ID"


def test_only_streams_that_asked_for_it_are_kept(live: Live):
    body = live.complete(**STORY).json()
    refusal_of(live.client.get(f"/v1/streams/{body['id']}"), 404)
    refusal = refusal_of(live.complete(prompt="a", n=33, stream=True, stream_options={"resumable": True}))
    assert refusal["param"] == "stream_options.resumable"


def test_what_is_kept_is_bounded(start):
    live: Live = start({"step_s": 0.002, "context": 100_000}, stream_memory_bytes=100_000)
    ids = [json.loads(parsed(live.complete(**STORY, **RESUMABLE).content)[0][1])["id"] for _ in range(10)]
    assert [live.client.get(f"/v1/streams/{each}").status_code for each in (ids[0], ids[-1])] == [404, 200]
    read_some(live, {**STORY, "max_tokens": 50_000}, 1000)
    assert live.engine.streams  # goes on without a reader
    live.until(lambda: live.complete(**STORY, **RESUMABLE).status_code == 429, "nothing more can be kept", 60)
    assert live.complete(**STORY).status_code == 200


def test_the_official_client_reads_ids_and_comments_between_them(start):
    live: Live = start({"step_s": 0.01}, sse_keep_alive_interval_s=0.004)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(
            client.completions.create(
                model="m",
                prompt="A long story",
                max_tokens=40,
                temperature=0,
                stream=True,
                stream_options={"resumable": True},  # type: ignore[typeddict-unknown-key]
                extra_body={"ignore_eos": True},
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks) == live.complete(**STORY).json()["choices"][0]["text"]
    raw = live.complete(**STORY, **RESUMABLE).content
    assert b": keep-alive\n" in raw
    assert b": keep-alive\n\n" not in raw
    parsed(raw)


# Idempotency-Key


def keyed(live: Live, key: str, **fields):
    headers = {"Idempotency-Key": key, "Authorization": fields.pop("owner", "Bearer a")}
    return live.client.post("/v1/completions", json={"model": "m", **STORY, **fields}, headers=headers)


def test_a_request_sent_twice_is_computed_once(start):
    live: Live = start({"step_s": 0.005})
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: keyed(live, "k", temperature=1), range(4)))
    answers.append(keyed(live, "k", temperature=1))
    assert all(answer.status_code == 200 for answer in answers)
    assert len({answer.content for answer in answers}) == 1
    assert len(live.engine.ended) == 1
    assert sum(answer.headers.get("idempotent-replayed") == "true" for answer in answers) == 4
    assert keyed(live, "other", temperature=1).content != answers[0].content
    assert keyed(live, "k", temperature=1, owner="Bearer b").content != answers[0].content


def test_so_is_a_stream(start):
    live: Live = start({"step_s": 0.005})
    with ThreadPoolExecutor(3) as pool:
        streams = list(pool.map(lambda _: keyed(live, "k", stream=True), range(3)))
    assert len({stream.content for stream in streams}) == 1
    assert streams[0].content.endswith(b"data: [DONE]\n\n")
    assert b"id: " not in streams[0].content
    assert len(live.engine.ended) == 1


def test_a_key_with_another_body_is_a_conflict(live: Live):
    assert keyed(live, "same").status_code == 200
    refused = keyed(live, "same", max_tokens=3)
    assert refusal_of(refused, 409)["code"] == "idempotency_conflict"
    assert refused.headers["x-should-retry"] == "false"


def test_what_was_refused_or_has_failed_is_tried_again(live: Live):
    fault = {"kind": "raise", "at_token": 2}
    for stream in (False, True):
        before = len(live.engine.ended)
        for _ in range(2):
            keyed(live, f"fails{stream}", stream=stream, x_fault=fault)
        assert len(live.engine.ended) == before + 2
    for _ in range(2):
        assert refusal_of(keyed(live, "refused", max_tokens=100_000))["code"] == "context_length_exceeded"


def test_a_client_who_was_cut_off_finds_its_answer_under_its_key(start):
    live: Live = start({"step_s": 0.01})
    raw = json.dumps({"model": "m", **STORY}).encode()
    sock = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    headers = {"Content-Type": "application/json", "Idempotency-Key": "k", "Authorization": "Bearer a"}
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *(": ".join(pair) for pair in headers.items())]
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + raw)
    live.until(lambda: bool(live.engine.streams), "running")
    sock.close()
    time.sleep(0.05)
    answer = live.client.post("/v1/completions", content=raw, headers=headers)
    assert answer.headers["idempotent-replayed"] == "true"
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert len(live.engine.ended) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_out_of_range_is_refused(live: Live, key):
    assert refusal_of(keyed(live, key))["param"] == "Idempotency-Key"
