"""langchain-openai against a real server: streams, tools, structured output, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.server.clients import NAMED, TOOL, WEATHER, tiny_server
from tests.server.conftest import Live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with tiny_server(tmp_path_factory.mktemp("models") / "long") as server:
        yield server


def model_of(live: Live, **options: Any) -> ChatOpenAI:
    asked = {"temperature": 0, "max_tokens": 200, "seed": 3} | options
    return ChatOpenAI(model="m", base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60, **asked)


def test_streamed_equals_whole(live: Live):
    model = model_of(live, max_tokens=24, stream_usage=True)
    whole = model.invoke("Hello")
    chunks = list(model.stream("Hello"))
    assert len(chunks) > 4
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content != ""
    assert chunks[0].id == chunks[-1].id
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 24
    assert whole.usage_metadata["output_tokens"] == 24


def test_tools_are_called_and_answered(live: Live):
    model = model_of(live, temperature=1).bind_tools([TOOL], tool_choice=NAMED)
    whole = model.invoke("Hello")
    (call,) = whole.tool_calls
    jsonschema.validate(call["args"], WEATHER)
    chunks = list(model.stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert len(chunks) > 4
    assert [(one["name"], one["args"]) for one in total.tool_calls] == [("get_weather", call["args"])]
    history = [("user", "Hello"), whole, {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}]
    assert model_of(live, max_tokens=4).bind_tools([TOOL]).invoke(history).response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(live: Live, method):
    schema = {"title": "Weather", "description": "The weather", **WEATHER}
    model = model_of(live, temperature=1).with_structured_output(schema, method=method)
    jsonschema.validate(model.invoke("Hello"), WEATHER)
    last = None
    for last in model.stream("Hello"):
        assert isinstance(last, dict)
    jsonschema.validate(last, WEATHER)


def test_embeddings(live: Live):
    # By itself it sends the token ids of another vocabulary, OpenAI's.
    model = OpenAIEmbeddings(model="m", base_url=f"{live.url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0)
    texts = ["the quick brown fox", "the lazy dog"]
    found = model.embed_documents(texts)
    assert [len(embedding) for embedding in found] == [64, 64]
    assert model.embed_query(texts[1]) == found[1] != found[0]
