"""HTTP/1.1 as uvicorn speaks it, with refusals in the envelope that all others have, and an end to who never ends a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from fastapi import FastAPI, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagestream.server.errors import HttpError, as_api_error, json_response

TWO_LENGTHS = {b"content-length", b"transfer-encoding"}

Answering = Callable[[h11.Request], Response | None]


def protocol_for(app: FastAPI) -> Callable[..., EnvelopeProtocol]:
    """What uvicorn makes of each connection to this application."""
    state = app.state
    return partial(
        EnvelopeProtocol, slow_sender_timeout_s=state.server.settings.slow_sender_timeout_s, answer_early=state.answer_early
    )


class ObservedConnection(h11.Connection):
    """Shows each request's head to `is_answered` before uvicorn sees it, which then goes on behind an answered one."""

    def __init__(self, is_answered: Callable[[h11.Request], bool]):
        super().__init__(h11.SERVER)
        self._is_answered = is_answered

    def next_event(self) -> Any:
        event = super().next_event()
        while isinstance(event, h11.Request) and self._is_answered(event):
            event = h11.NEED_DATA if self.our_state is h11.CLOSED else super().next_event()
        return event


class EnvelopeProtocol(H11Protocol):
    """What is no HTTP request never reaches the application, whose envelope uvicorn does not know.

    Nor does one whose head takes longer than `slow_sender_timeout_s` (0: for ever), though it holds a connection.  The same time
    bounds what is left of a body whose answer is out already; one that a route waits for is `read_limited`'s matter.

    What `answer_early` answers by its head alone doesn't reach the application either.
    """

    def __init__(
        self, *arguments: Any, slow_sender_timeout_s: float = 0.0, answer_early: Answering | None = None, **options: Any
    ):
        super().__init__(*arguments, **options)
        self._answer_early = answer_early
        self.conn = ObservedConnection(self._is_answered)
        self._slow_sender_timeout_s = slow_sender_timeout_s
        self._sender_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_sender()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_sender()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_sender(self) -> None:
        """Start or stop the timer, by whose turn it is.  Between two requests it is uvicorn's, whose own timer runs then."""
        ours, theirs = self.conn.our_state, self.conn.their_state
        is_head = ours is theirs is h11.IDLE and self.timeout_keep_alive_task is None
        is_left_over = ours is h11.DONE and theirs is h11.SEND_BODY
        if not (is_head or is_left_over) or self._slow_sender_timeout_s <= 0:
            self._stop_watching()
        elif self._sender_timer is None:
            self._sender_timer = self.loop.call_later(self._slow_sender_timeout_s, self._give_up_sender)

    def _stop_watching(self) -> None:
        if self._sender_timer is not None:
            self._sender_timer.cancel()
            self._sender_timer = None

    def _give_up_sender(self) -> None:
        self._sender_timer = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:  # who never sent a byte gets none
            refusal = f"the request's head did not arrive within {self._slow_sender_timeout_s:g} s"
            self._refuse(HttpError(408, refusal, code="request_timeout"))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer to speak another protocol, as Java's client makes each time, is passed over without a word in the log."""

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has raised.  Says what was wrong, and nothing where an answer has begun: it would be read as a part of that."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            reason = "its head is too large" if status == 431 else str(error or msg)
            self._refuse(HttpError(status, f"no valid HTTP request: {reason}", code="invalid_http"))
        self.transport.close()

    def _is_answered(self, request: h11.Request) -> bool:
        """As uvicorn ends a response that came before its request's body had, but in one write."""
        if {name for name, _ in request.headers} >= TWO_LENGTHS:
            # Where it ends is a matter of opinion, and somebody else's request may hide in what a proxy takes for its body.
            self._refuse(HttpError(400, "no valid HTTP request: it has two lengths", code="invalid_http"))
        elif self._answer_early is not None and (response := self._answer_early(request)) is not None:
            headers = [*self.server_state.default_headers, *response.raw_headers]
            self._send_whole(response.status_code, headers, bytes(response.body))
        else:
            return False
        if self.conn.our_state is h11.MUST_CLOSE:
            self.conn.send(h11.ConnectionClosed())
            self.transport.close()
        self.on_response_complete()
        return True

    def _refuse(self, refusal: HttpError) -> None:
        told = as_api_error(refusal)
        body = json_response(told.envelope()).body
        headers = [
            (b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode()), (b"Connection", b"close")
        ]  # fmt: skip
        self._send_whole(told.status, headers, bytes(body))

    def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        sent = [self.conn.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self.transport.write(b"".join(sent))
