"""The official Python client, which is how most people will meet this server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import Live, running

ASKED = {"model": "m", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "Name a fruit."}]


@pytest.fixture(scope="module")
def keen() -> Iterator[Live]:
    """A server whose keep-alive comments come between nearly all chunks."""
    with running({"step_s": 0.01}, sse_keep_alive_interval_s=0.004) as server:
        yield server


@pytest.fixture
def client(keen: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=keen.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_completions(client: openai.OpenAI):
    whole = client.completions.create(prompt="The capital of France is", **ASKED)
    chunks = list(
        client.completions.create(prompt="The capital of France is", stream=True, stream_options={"include_usage": True}, **ASKED)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_chat(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **ASKED)
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **ASKED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content != ""
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == 24
    again = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "Another."}]
    assert client.chat.completions.create(messages=again, **ASKED).choices[0].message.content


def test_the_clients_own_stream_helper(client: openai.OpenAI):
    with client.chat.completions.stream(model="m", messages=MESSAGES, max_tokens=24, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["m", "other/name"]
    assert client.models.retrieve("other/name").id == "other/name"


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="a", stream=True)
    assert missing.value.code == "model_not_found"


def test_a_failure_in_a_stream_is_raised(client: openai.OpenAI):
    stream = client.completions.create(
        model="m", prompt="a", stream=True, extra_body={"x_fault": {"kind": "raise", "at_token": 3}, "ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="injected fault"):
        list(stream)


def test_a_failure_is_not_repeated(keen: Live):
    def failures() -> float:
        return keen.metric('http_requests_total{handler="/v1/completions",method="POST",status="500"')

    before = failures()
    with (
        openai.OpenAI(base_url=keen.url + "/v1", api_key="none", max_retries=3, timeout=60) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(model="m", prompt="a", extra_body={"x_fault": {"kind": "raise"}})
    keen.until(lambda: failures() > before, "counted")  # an answer is counted once its last byte is sent
    assert failures() == before + 1


async def test_the_async_client_can_leave_a_stream(keen: Live):
    async with openai.AsyncOpenAI(base_url=keen.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="m", prompt="A long story", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    keen.until(lambda: not keen.engine.streams, "aborted")
