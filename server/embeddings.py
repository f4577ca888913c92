"""POST /v1/embeddings: the direction of the served model's hidden states, after its last norm, for each input."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from pagestream.engine import DeadlineExceeded, FinishReason, Overloaded, Pooling, RequestFailed, RequestOutput, SamplingParams
from pagestream.server.answer import encode
from pagestream.server.fields import Flag, ModelRequest, Real, Text, Whole, as_prompts, prompt_schema
from pagestream.server.generation import MAX_TIMEOUT_S, places_of, read_request, refuse_idempotency, time_limit_s, while_connected
from pagestream.server.key_limits import Lease, owner_of
from pagestream.server.state import server_state

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

MAX_INPUTS = 2048  # OpenAI's
# Of one request at a time: a large one then neither fills the queue nor keeps others waiting for all of it.
INPUTS_AT_ONCE = 64
PLACES_SHARE = 2  # and at most such a part of all places
LOOK_AGAIN_S = 0.05  # for room, where others took it all after a request's first inputs were computed

Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(partial(as_prompts, name="input", most=MAX_INPUTS)),
    WithJsonSchema(prompt_schema("One or more inputs, as text or as token ids.", MAX_INPUTS)),
]


class EmbeddingRequest(ModelRequest):
    """POST /v1/embeddings."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"dimensions": ()}
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2", "input": ["The sky is blue.", "The sea is deep."]}}
    )

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = Field("float", description="base64: of little-endian float32.")
    pooling: Literal["mean", "last"] | None = Field(
        "mean",
        description="mean: of all tokens' states; last: the last token's alone, for models that were trained for that. Of a model "
        "that was trained to predict tokens, the last state is about the next token, and a full stop more or less changes it.",
    )
    add_special_tokens: Flag | None = Field(True, description="Whether the tokenizer may add its begin-of-sequence token.")
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=1, le=2**31 - 1, description="Only each input's last so many tokens count."
    )
    priority: Whole | None = Field(0, description="Lower goes first, where the server schedules by priority.")
    cache_salt: Text | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    timeout_s: Real | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="Seconds from arrival; a 408 when they are over.")
    user: Text | None = Field(None, description="Accepted for compatibility; without effect.")


async def create_embeddings(http: Request) -> Response:
    request = await read_request(http, EmbeddingRequest)
    refuse_idempotency(http)
    state = server_state(http)
    http.state.answer_id = f"embd-{uuid.uuid4().hex}"
    embeddings = Embeddings(request, http.state.answer_id, state.engine, time_limit_s(http, request.timeout_s))
    lease = state.key_limits.take(owner_of(http))
    return Response(await while_connected(http, embeddings.whole(lease)), media_type="application/json")


class Embeddings:
    """One request's answer.  Inputs go through the engine as prompts do, beside whatever else it computes."""

    def __init__(self, request: EmbeddingRequest, answer_id: str, engine: AsyncLLMEngine, timeout_s: float | None):
        self._request = request
        self._id = answer_id
        self._engine = engine
        self._timeout_s = timeout_s
        self._num_tokens = 0
        self._parts: list[str] = []  # written as they come: all at once would hold up the event loop

    async def whole(self, lease: Lease) -> bytes:
        """The body.  Raises ClientError, also where only a later input is at fault, and EngineFault."""
        inputs = self._request.input
        places = places_of("input", len(inputs))
        end_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        most = min(INPUTS_AT_ONCE, max(1, self._engine.num_places // PLACES_SHARE))
        try:
            start = 0
            while start < len(inputs):
                end = start + await self._room(min(most, len(inputs) - start), end_s)
                try:
                    await self._add(inputs[start:end], places[start:end], end_s)
                    start = end
                except Overloaded as error:  # by others, who came while these were cut into tokens
                    if error.draining or not self._parts:
                        raise
                    await asyncio.sleep(LOOK_AGAIN_S)
        except DeadlineExceeded:
            raise DeadlineExceeded(self._timeout_s or 0.0) from None  # of all of them, not of what a part had left
        finally:
            lease.give_back(self._num_tokens)
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        rest = encode({"model": self._request.model, "usage": usage})
        return f'{{"object":"list","data":[{",".join(self._parts)}],{rest[1:]}'.encode("ascii")

    async def _room(self, most: int, end_s: float | None) -> int:
        """How many inputs to go on with.  Who has begun waits for room; nobody else does, so that a full queue is told at once."""
        while True:
            if self._parts and end_s is not None and time.monotonic() > end_s:
                raise DeadlineExceeded(self._timeout_s or 0.0)
            number = self._engine.num_admissible(most)
            if number or not self._parts or not self._engine.is_ready:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        return max(1, number)

    async def _add(self, inputs: Sequence[str | list[int]], places: Sequence[str], end_s: float | None) -> None:
        request = self._request
        streams = await self._engine.add_requests(
            self._id,
            inputs,
            SamplingParams(max_tokens=0),
            param=places,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            add_special_tokens=request.add_special_tokens is not False,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            timeout_s=None if end_s is None else max(0.0, end_s - time.monotonic()),
            pooling=Pooling(request.pooling or "mean"),
        )
        try:
            for stream in streams:
                async for output in stream:
                    if output.finished:
                        self._take(output)
        finally:
            for stream in streams:
                stream.abort()

    def _take(self, output: RequestOutput) -> None:
        self._num_tokens += output.usage.num_prompt_tokens
        if output.embedding is None:
            reason = output.outputs[0].finish_reason if output.outputs else None
            if reason is FinishReason.DEADLINE:
                raise DeadlineExceeded(self._timeout_s or 0.0)
            raise RequestFailed(output.error or "the request was aborted")
        self._parts.append(self._written(output.embedding))

    def _written(self, embedding: Sequence[float]) -> str:
        head = f'{{"object":"embedding","index":{len(self._parts)},"embedding":'
        if self._request.encoding_format == "base64":
            packed = struct.pack(f"<{len(embedding)}f", *embedding)
            return f'{head}"{base64.b64encode(packed).decode()}"}}'
        # Nine digits name a float32, and no shorter ones do.
        return f"{head}[{','.join([f'{number:.9g}' for number in embedding])}]}}"
