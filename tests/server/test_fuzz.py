"""Any bytes as a body: an answer or a refusal, never a failure of ours, and the server stays as it was."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Live, running

FUZZED = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
# Of this engine, which stands in for the real one: it computes no beams, and injects what is asked for.
NOT_FUZZED = {"x_fault", "use_beam_search"}
ODD = [0, 1, -1, 2, 3.5, 1e308, -0.0, 2**31, 2**63, 2**64, 10**30, True, None, "", "a", "\x00", "\ud7ff", "é" * 50, [], {}, [[]], [None], {"a": 1}]

MOST_BYTES_PER_BYTE = 100

json_values = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Live]:
    with running() as live:
        yield live


def names(live: Live, schema: str) -> list[str]:
    document = live.client.get("/openapi.json").json()
    return sorted(set(document["components"]["schemas"][schema]["properties"]) - NOT_FUZZED)


def check(live: Live, path: str, raw: bytes) -> None:
    response = live.raw(raw, path)
    assert response.status_code < 500, (raw[:500], response.text[:500])
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_bytes(fuzzed: Live, path):
    @FUZZED
    @given(st.binary(max_size=300) | st.text(alphabet='{}[]",:0123456789.eE-truefalsn\\u ', max_size=200).map(str.encode))
    def run(raw: bytes) -> None:
        check(fuzzed, path, raw)

    run()
    assert fuzzed.complete(prompt="Hello", max_tokens=2).status_code == 200


# Of 2 MB each: whatever they hold, what is made of them must stay in proportion.
BULKY = {
    "brackets": b"[" * 2_000_000,
    "pairs of brackets": b"[" + b"[]," * 666_000 + b"[]]",
    "objects": b'{"model": "m", "prompt": [' + b"{}," * 660_000 + b"{}]}",
    "numbers": b'{"model": "m", "prompt": [' + b"1," * 990_000 + b"1]}",
    "digits": b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 2_000_000 + b"}",
    "prompts": b'{"model": "m", "prompt": [' + b'"a",' * 490_000 + b'"a"]}',
    "fields": b'{"model": "m", "prompt": "a"' + b"".join(b',"f%06d":1' % number for number in range(160_000)) + b"}",
    "escapes": b'{"model": "m", "prompt": "' + b"\\u0041" * 330_000 + b'"}',
    "stops": b'{"model": "m", "prompt": "a", "stop": [' + b'"b",' * 490_000 + b'"b"]}',
    "biases": b'{"model": "m", "prompt": "a", "logit_bias": {' + b",".join(b'"%d":1' % number for number in range(180_000)) + b"}}",
}


@pytest.mark.parametrize("raw", BULKY.values(), ids=BULKY)
def test_no_body_takes_memory_beyond_measure(fuzzed: Live, raw):
    tracemalloc.start()
    try:
        check(fuzzed, "/v1/completions", raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES_PER_BYTE * len(raw), f"{peak / len(raw):.0f} bytes for each of the body"
    assert fuzzed.complete(prompt="Hello", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("path", "schema", "base"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "a"}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_any_values_of_any_fields(fuzzed: Live, path, schema, base):
    known = names(fuzzed, schema)

    @FUZZED
    @given(st.dictionaries(st.sampled_from(known), json_values, max_size=3))
    def run(fields: dict) -> None:
        body = {"model": "m", "max_tokens": 3, **base, **fields}
        check(fuzzed, path, json.dumps(body).encode("utf-8", "surrogatepass"))

    run()
    assert fuzzed.complete(prompt="Hello", max_tokens=2).status_code == 200


@pytest.mark.parametrize("name", ["Last-Event-ID", "Idempotency-Key", "X-Request-Timeout", "X-Request-Id"])
def test_any_value_of_a_header(fuzzed: Live, name):
    @settings(FUZZED, max_examples=40)
    @given(st.binary(max_size=60).map(lambda raw: bytes(byte for byte in raw if byte >= 0x20 and byte != 0x7F).strip()))
    def run(value: bytes) -> None:
        body = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
        head = [(b"Content-Type", b"application/json"), (name.encode(), value)]
        response = fuzzed.client.post("/v1/completions", content=body, headers=head)
        assert response.status_code < 500, value
        assert fuzzed.client.get("/v1/streams/none", headers=head[1:]).status_code < 500

    run()
