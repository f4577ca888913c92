"""From a checked request to its response: admission, then a stream or a whole answer; the same for completions and chat."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from pagestream.engine import Begun, InvalidRequest
from pagestream.server.answer import Answer
from pagestream.server.body import IDEMPOTENCY_KEY, read_body
from pagestream.server.errors import json_response
from pagestream.server.fields import ModelRequest
from pagestream.server.key_limits import owner_of
from pagestream.server.shared import MAX_CHOICES, SharedStream, claim_of
from pagestream.server.sse import AnswerStream, answer_bytes
from pagestream.server.state import ServerState, server_state

T = TypeVar("T")
Asked = TypeVar("Asked", bound=ModelRequest)
Prompts = Sequence[str | list[int]]

MAX_TIMEOUT_S = 86400
DELTAS_OF_WHOLE = 64  # at a time, of an answer that is sent whole: by each, its reader would be woken for nothing


async def read_request(http: Request, wire: type[Asked]) -> Asked:
    """The body as this wire type, for a model that is served.  Raises as `read_body` and `check_name`."""
    request = await read_body(http, wire)
    check_name(http, request.model)
    return request


def check_name(http: Request, name: str) -> None:
    """Raises InvalidRequest (404) for a name that isn't served."""
    if name not in server_state(http).settings.served_model_names:
        raise InvalidRequest(
            f"the model {name[:100]!r} is not served here; GET /v1/models lists what is", param="model", code="model_not_found"
        )


async def respond(http: Request, answer: Answer, prompts: Prompts, param: str) -> Response:
    """Admit all prompts or none, then answer.  Until admission every failure is a plain status; the client may leave at any time.

    `param` is the field that the prompts came from.  Raises ClientError, EngineFault and ClientDisconnect.
    """
    introduce(http, answer)
    if answer.request.wants_resumable or IDEMPOTENCY_KEY in http.headers:
        return await respond_shared(http, answer, prompts, param)
    return await respond_alone(http, answer, prompts, param, answer_bytes(answer))


async def respond_alone(http: Request, answer: Answer, prompts: Prompts, param: str, events: AsyncIterator[bytes]) -> Response:
    """The response of an answer that ends with its connection; `events` are its stream's."""
    state = server_state(http)

    async def whole() -> dict[str, Any]:
        await admit(state, answer, prompts, param)
        return await answer.whole()

    if answer.request.stream:
        await while_connected(http, admit(state, answer, prompts, param))
        return AnswerStream(answer, state.settings, events)
    return json_response(await while_connected(http, whole()))


def introduce(http: Request, answer: Answer) -> None:
    """Give an answer what its request says besides the body: its place in the log, its deadline, and whose key pays for it.

    Raises InvalidRequest.
    """
    http.state.answer_id = answer.id
    answer.timeout_s = time_limit_s(http, answer.timeout_s)
    limits, owner = server_state(http).key_limits, owner_of(http)
    answer.take_lease = lambda: limits.take(owner)


def refuse_idempotency(http: Request) -> None:
    """For routes whose answers end with their connection.  Raises InvalidRequest where a client counts on more."""
    if IDEMPOTENCY_KEY in http.headers:
        raise InvalidRequest(
            "Idempotency-Key is not supported here; /v1/completions and /v1/chat/completions take it",
            param="Idempotency-Key",
            code="unsupported_parameter",
        )


async def respond_shared(http: Request, answer: Answer, prompts: Prompts, param: str) -> Response:
    """The response of an answer that outlives its connection: begun now, or begun earlier under the same Idempotency-Key."""
    state = server_state(http)
    answers = state.shared_answers
    if answer.request.wants_resumable and len(prompts) * answer.params.n > MAX_CHOICES:
        raise InvalidRequest(f"a resumable stream has at most {MAX_CHOICES} choices", param="stream_options.resumable")
    claim = claim_of(http)
    shared = answers.find_claimed(claim) if claim else None
    is_replayed = shared is not None
    if shared is None:
        shared = answers.begin(answer, lambda: admit(state, answer, prompts, param), claim)
    http.state.answer_id = shared.id
    headers = {"Idempotent-Replayed": "true"} if is_replayed else {}
    shared.attach()
    try:
        if answer.request.stream:
            await while_connected(http, shared.until_admitted())
            return SharedStream(shared, state.settings, with_ids=answer.request.wants_resumable, headers=headers)
        whole = await while_connected(http, shared.until_whole())
    except BaseException:
        shared.detach()
        if claim is None:
            answers.drop(shared)  # nobody has learned its id
        raise
    shared.detach()
    return Response(whole, headers=headers, media_type="application/json")


async def admit(state: ServerState, answer: Answer, prompts: Prompts, param: str, begun: Sequence[Begun] = ()) -> None:
    """Admit all prompts or none, and note them in the journal.  A stream can be resumed only once they are there."""
    engine, journal = state.engine, state.journal if answer.is_journalled else None
    request = answer.request
    lease = None if answer.take_lease is None else answer.take_lease()
    try:
        streams = await engine.add_requests(
            answer.id,
            prompts,
            answer.params,
            param=places_of(param, len(prompts)),
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            fault=request.fault(),
            add_special_tokens=request.adds_special_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            include_timeline=bool(request.include_timeline),
            timeout_s=answer.timeout_s,
            begun=begun,
        )
    except BaseException:
        if lease is not None:
            lease.give_back(0)
        raise
    answer.lease = lease
    if request.wants_resumable or not request.stream:
        for stream in streams:
            stream.keep_deltas(1 if request.stream else DELTAS_OF_WHOLE)
    answer.begin(streams, engine.tokenizer)
    answer.find_place = lambda: engine.queue_place(answer.id)
    if journal is not None:
        journal.admitted(answer, streams)
        if request.wants_resumable:
            await journal.written()


def places_of(field: str, number: int) -> list[str]:
    """Of one entry, or of several, in a field that takes both."""
    return [field] if number == 1 else [f"{field}[{index}]" for index in range(number)]


def time_limit_s(http: Request, asked_s: float | None) -> float | None:
    """The lesser of the body's timeout_s and the header X-Request-Timeout.  Raises InvalidRequest."""
    given = http.headers.get("x-request-timeout")
    if given is None:
        return asked_s
    try:
        limit_s = float(given[:32])
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"X-Request-Timeout must be seconds above 0, at most {MAX_TIMEOUT_S}", param="X-Request-Timeout")
    return limit_s if asked_s is None else min(asked_s, limit_s)


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises ClientDisconnect, with the work cancelled, as soon as the client has left.

    Call it after the body was read: what is received from then on can only be the end of the connection.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
