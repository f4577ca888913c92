"""From a checked request to its response: admission, then a stream or a whole answer; the same for completions and chat."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from pagestream.engine import Begun, InvalidRequest
from pagestream.server.answer import Answer
from pagestream.server.body import IDEMPOTENCY_KEY
from pagestream.server.errors import json_response
from pagestream.server.journal import Journal
from pagestream.server.key_limits import KeyLimits, owner_of
from pagestream.server.settings import ServerSettings
from pagestream.server.shared import MAX_CHOICES, SharedAnswers, SharedStream, claim_of
from pagestream.server.sse import AnswerStream

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TIMEOUT_S = 86400


def check_name(name: str, settings: ServerSettings) -> None:
    """Raises InvalidRequest (404) for a name that isn't served."""
    if name not in settings.served_model_names:
        raise unknown_model(name)


def unknown_model(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model {name[:100]!r} is not served here; GET /v1/models lists what is", param="model", code="model_not_found"
    )


async def respond(
    http: Request,
    engine: AsyncLLMEngine,
    settings: ServerSettings,
    answer: Answer,
    prompts: Sequence[str | list[int]],
    param: str,
) -> Response:
    """Admit all prompts or none, then answer.  Until admission every failure is a plain status; the client may leave at any time.

    `param` is the field that the prompts came from.  Raises ClientError, EngineFault and ClientDisconnect.
    """
    introduce(http, settings, answer)
    request = answer.request
    answers: SharedAnswers = http.app.state.shared_answers
    journal: Journal | None = http.app.state.journal
    if request.wants_resumable or IDEMPOTENCY_KEY in http.headers:
        num_choices = len(prompts) * answer.params.n
        return await respond_shared(
            http, settings, answers, answer, lambda: admit(engine, answer, prompts, param, journal), num_choices
        )
    if request.stream:
        await while_connected(http, admit(engine, answer, prompts, param, journal))
        return AnswerStream(answer, settings)
    return json_response(await while_connected(http, admitted_and_whole(engine, answer, prompts, param, journal)))


async def admitted_and_whole(
    engine: AsyncLLMEngine, answer: Answer, prompts: Sequence[str | list[int]], param: str, journal: Journal | None = None
) -> dict[str, Any]:
    await admit(engine, answer, prompts, param, journal)
    return await answer.whole()


def introduce(http: Request, settings: ServerSettings, answer: Answer) -> None:
    """Give an answer what its request says besides the body: its place in the log, its deadline, and whose key pays for it.

    Raises InvalidRequest.
    """
    http.state.answer_id = answer.id
    answer.timeout_s = time_limit_s(http, answer.timeout_s)
    limits: KeyLimits = http.app.state.key_limits
    owner = owner_of(http, bool(settings.api_keys))
    answer.take_lease = lambda: limits.take(owner)


def refuse_idempotency(http: Request) -> None:
    """For routes whose answers end with their connection.  Raises InvalidRequest where a client counts on more."""
    if IDEMPOTENCY_KEY in http.headers:
        raise InvalidRequest(
            "Idempotency-Key is not supported here; /v1/completions and /v1/chat/completions take it",
            param="Idempotency-Key",
            code="unsupported_parameter",
        )


async def respond_shared(
    http: Request,
    settings: ServerSettings,
    answers: SharedAnswers,
    answer: Answer,
    admission: Callable[[], Awaitable[None]],
    num_choices: int,
) -> Response:
    """The response of an answer that outlives its connection: begun now, or begun earlier under the same Idempotency-Key."""
    if answer.request.wants_resumable and num_choices > MAX_CHOICES:
        raise InvalidRequest(f"a resumable stream has at most {MAX_CHOICES} choices", param="stream_options.resumable")
    claim = claim_of(http)
    shared = answers.find_claimed(claim) if claim else None
    is_replayed = shared is not None
    if shared is None:
        shared = answers.begin(answer, admission, claim)
    http.state.answer_id = shared.id
    headers = {"Idempotent-Replayed": "true"} if is_replayed else {}
    shared.attach()
    try:
        if answer.request.stream:
            await while_connected(http, shared.until_admitted())
            return SharedStream(shared, settings, with_ids=answer.request.wants_resumable, headers=headers)
        whole = await while_connected(http, shared.until_whole())
    except BaseException:
        shared.detach()
        if claim is None:
            answers.drop(shared)  # nobody has learned its id
        raise
    shared.detach()
    return Response(whole, headers=headers, media_type="application/json")


async def admit(
    engine: AsyncLLMEngine,
    answer: Answer,
    prompts: Sequence[str | list[int]],
    param: str,
    journal: Journal | None = None,
    begun: Sequence[Begun] = (),
) -> None:
    """Admit all prompts or none, and note them in the journal.  A stream can be resumed only once they are there."""
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
    if request.wants_resumable:
        for stream in streams:
            stream.keep_deltas()
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
