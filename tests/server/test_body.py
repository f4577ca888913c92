"""Refusals of bodies: what is no JSON object, too large, too deep, or not called JSON."""

from __future__ import annotations

import codecs
import gzip
import json
import threading
import time

import pytest
from pydantic import ValidationError

from pagestream.server.body import parse
from pagestream.server.conversation import ChatRequest
from pagestream.server.protocol import CompletionRequest
from tests.server.conftest import Live, refusal_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = 20_000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("raw", [b"[]", b'"text"', b"null", b"12", b"true"])
def test_a_body_that_is_no_object_is_refused(live: Live, path, raw):
    assert "object" in refusal_of(live.raw(raw, path))["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b"{",
        b"{}",
        b'{"model":"m",}',
        b"{'model':'m'}",
        b'\xff\xfe{"a":1}',
        codecs.BOM_UTF8,
        b'{"model":"m","prompt":"\xc3"}',
        b'{"model":"m","prompt":"a\nb"}',
        b'{"seed":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 40 + b"]" * 40,
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_body_that_is_no_sound_json_is_refused(live: Live, path, raw):
    refusal_of(live.raw(raw, path))


@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools"])
def test_a_deeply_nested_field_is_refused(live: Live, field):
    nested = "[" * 40 + "]" * 40
    raw = f'{{"model":"m","messages":[{{"role":"user","content":"a"}}],"{field}":{{"a":{nested}}}}}'
    assert "nested" in refusal_of(live.raw(raw.encode(), CHAT))["message"]


@pytest.mark.parametrize(("num_levels", "is_refused"), [(31, False), (32, True)])
@pytest.mark.parametrize("beside", [b"", b"[1, {}], " * 40, rb'"a\\", "\"[[[", ' + b'"}]", ' * 40], ids=["alone", "pairs", "texts"])
def test_the_depth_has_an_exact_end(live: Live, num_levels, is_refused, beside):
    """Of the body, which is a level itself: told before it is parsed."""
    nested = b"[" * num_levels + beside.removesuffix(b", ") + b"]" * num_levels
    error = refusal_of(live.raw(b'{"model":"m","prompt":"a","x":%s}' % nested))
    pairs = num_levels == 31 and beside.startswith(b"[")  # which go two levels deeper
    assert ("nested" in error["message"]) == (is_refused or pairs)


def test_the_number_of_arrays_and_objects_is_bounded(live: Live):
    raw = b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{"a":[%s{}]}}'
    assert live.raw(raw % (b"[]," * 65_000), CHAT).status_code == 200
    assert "arrays and objects" in refusal_of(live.raw(raw % (b"[]," * 66_000), CHAT))["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {f"f{number}": 1 for number in range(MANY)},
        {"stream": True, "stream_options": {f"f{number}": 1 for number in range(MANY)}},
        {"allowed_token_ids": [-1] * MANY},
        {"logit_bias": {f"{number}": "x" for number in range(5 * MANY)}},
        {"messages": [{"role": "user", "content": [1] * MANY}]},
        {"messages": ["a"] * MANY},
        {"tools": ["a"] * MANY},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_a_body_of_faults_is_looked_through_no_further_than_one_tells(fields):
    """Each would be described, which takes seconds where there are hundreds of thousands."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    assert caught.value.error_count() < 5000


def test_a_call_sent_back_may_hold_any_text(start):
    live = start({"context": 200_000})
    for arguments in ("[" * 100_000, "{", "[1]", '{"a": 1}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        turns = [{"role": "user", "content": "a"}, answer, {"role": "tool", "tool_call_id": "1", "content": "b"}]
        assert live.chat(messages=turns, max_tokens=1).status_code == 200


@pytest.mark.parametrize("schema", ["{", "[1]", '"a"', "false", '{"a":' * 40_000, "[" * 40_000])
def test_a_schema_that_is_none_is_refused_beside_tools_too(live: Live, schema):
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refusal_of(live.chat(tools=tools, structured_outputs={"json": schema}))
    assert (error["param"], error["code"]) == ("structured_outputs.json", "invalid_constraint")
    assert live.chat(tools=tools, structured_outputs={"json": "true"}, max_tokens=1).status_code == 200


@pytest.mark.parametrize("text", ["[" * 100, "{" * 100, '"{[' * 40, "\\[" * 40, '\\"[' * 40])
def test_brackets_inside_a_text_are_no_nesting(live: Live, text):
    assert live.complete(prompt=text, max_tokens=1).status_code == 200


@pytest.mark.parametrize("raw", [rb"\ud800", rb"\udc00\ud800", rb"a\uD83D"])
def test_half_a_surrogate_pair_is_no_text(live: Live, raw):
    for body in (
        b'{"model":"m","prompt":"%s"}' % raw,
        b'{"model":"m","prompt":"a","stop":["%s"]}' % raw,
        b'{"model":"m","%s":1}' % raw,
    ):
        refusal_of(live.raw(body))
    assert live.raw(rb'{"model":"m","prompt":"\ud83d\ude00","max_tokens":1}').status_code == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "seed", "max_tokens", "x_unknown"])
def test_a_number_that_json_does_not_have_is_refused_by_name(live: Live, field, literal):
    assert refusal_of(live.raw(f'{{"model":"m","prompt":"a","{field}":{literal}}}'.encode()))["param"] == field


def test_nan_is_refused_where_any_value_may_stand(live: Live):
    raw = b'{"model":"m","messages":[{"role":"user","content":"NaN"}],"max_tokens":1,"chat_template_kwargs":{"a":%s}}'
    assert "NaN" in refusal_of(live.raw(raw % b"NaN", CHAT))["message"]
    assert live.raw(raw % b'"NaN"', CHAT).status_code == 200


def test_others_have_their_turn_while_a_large_body_is_read():
    """The longest time without one, as a share of all the time that it takes; of several tries the best."""
    raw = json.dumps({"model": "m", "prompt": [[123] * 500_000, [7] * 500_000], "seed": 1}, separators=(",", ":")).encode()
    shares = []
    for _ in range(5):
        reading = threading.Thread(target=parse, args=(raw, CompletionRequest))
        started_s = last_s = time.perf_counter()
        longest_s = 0.0
        reading.start()
        while reading.is_alive():
            time.sleep(0.0001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        shares.append(longest_s / (last_s - started_s))
    assert min(shares) < 0.3


@pytest.mark.parametrize("number", [b"1e400", b"-1E+400", b"1e0400", b"1" + b"0" * 400 + b".0", b"9" * 250 + b".5e99"])
def test_a_number_beyond_all_floats_is_refused_where_any_value_may_stand(live: Live, number):
    raw = b'{"model":"m","input":"Hello","max_output_tokens":1,"tools":[{"type":"function","name":"f","parameters":{"maximum":%s}}]}'
    refusal_of(live.raw(raw % number, "/v1/responses"))
    assert live.raw(raw % b"1e300", "/v1/responses").json()["tools"][0]["parameters"] == {"maximum": 1e300}


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", ""]
)
def test_json_must_be_called_json(live: Live, kind):
    body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1}).encode()
    request = live.client.build_request("POST", COMPLETIONS, content=body, headers={} if kind is None else {"Content-Type": kind})
    assert refusal_of(live.client.send(request), 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "x"])
def test_a_body_in_a_coding_is_refused_by_its_name(live: Live, coding):
    raw = gzip.compress(b'{"model":"m","prompt":"Hello","max_tokens":1}')
    response = live.raw(raw, **{"Content-Encoding": coding})
    assert coding in refusal_of(response, 415)["message"]
    assert response.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("coding", ["identity", ""])
def test_a_body_as_it_is_may_say_so(live: Live, coding):
    assert live.raw(b'{"model":"m","prompt":"Hello","max_tokens":1}', **{"Content-Encoding": coding}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_may_begin_with_the_mark_of_its_coding(live: Live, path):
    body = {COMPLETIONS: b'"prompt":"Hello"', CHAT: b'"messages":[{"role":"user","content":"Hello"}]'}[path]
    assert live.raw(codecs.BOM_UTF8 + b'{"model":"m","max_tokens":1,' + body + b"}", path).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_read_whatever_its_parameters(live: Live, kind):
    assert live.raw(b'{"model":"m","prompt":"Hello","max_tokens":1}', **{"Content-Type": kind}).status_code == 200


def test_a_large_body_is_413_before_it_is_read(start):
    server = start(max_body_bytes=1000)
    assert server.complete(prompt="a" * 900, max_tokens=0, echo=True).status_code != 413
    assert refusal_of(server.complete(prompt="a" * 1000), 413)["code"] == "body_too_large"

    def pieces():
        for _ in range(4):
            yield b"a" * 400

    assert (
        refusal_of(server.client.post(COMPLETIONS, content=pieces(), headers={"Content-Type": "application/json"}), 413)["code"]
        == "body_too_large"
    )
