"""litellm against a real server.  It brings 250 MB of other services' clients: `pip install -e '.[clients]'`; hence slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.server.clients import MESSAGES, NAMED, TOOL, WEATHER, tiny_server
from tests.server.conftest import Live

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks prices up on the network when imported
        with tiny_server(tmp_path_factory.mktemp("models") / "long") as server:
            yield server


def ask(live: Live, **fields: Any) -> Any:
    import litellm

    asked = {"temperature": 1, "seed": 3, "max_tokens": 200, "messages": MESSAGES} | fields
    return litellm.completion(model="openai/m", api_base=f"{live.url}/v1", api_key="none", num_retries=0, timeout=60, **asked)


def test_streamed_equals_whole(live: Live):
    fields = {"max_tokens": 24, "temperature": 0}
    whole = ask(live, **fields)
    chunks = list(ask(live, **fields, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 4
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_tools_are_called_and_answered(live: Live):
    fields = {"tools": [TOOL], "tool_choice": NAMED}
    whole = ask(live, **fields)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, whole.choices[0].finish_reason) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    deltas = [chunk.choices[0].delta.tool_calls for chunk in ask(live, **fields, stream=True) if chunk.choices]
    pieces = [delta[0].function.arguments or "" for delta in deltas if delta]
    assert len(pieces) > 2
    assert "".join(pieces) == call.function.arguments
    history = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    assert ask(live, messages=history, tools=[TOOL], max_tokens=4).choices[0].finish_reason == "length"


def test_structured_output(live: Live):
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    whole = ask(live, response_format=wanted).choices[0].message.content
    jsonschema.validate(json.loads(whole), WEATHER)
    chunks = ask(live, response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_embeddings(live: Live):
    import litellm

    found = litellm.embedding(model="openai/m", input=["the lazy dog"], api_base=f"{live.url}/v1", api_key="none", encoding_format="float")
    assert len(found.data[0]["embedding"]) == 64
