"""HTTP/1.1 as uvicorn speaks it, with refusals in the envelope that all others have."""

from __future__ import annotations

import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagestream.server.errors import HttpError, as_api_error, json_response


class EnvelopeProtocol(H11Protocol):
    """What is no HTTP request never reaches the application, whose envelope uvicorn does not know."""

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has raised.  Says what was wrong, and nothing where an answer has begun: it would be read as a part of that."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            reason = "its head is too large" if status == 431 else str(error or msg)
            told = as_api_error(HttpError(status, f"no valid HTTP request: {reason}", code="invalid_http"))
            body = json_response(told.envelope()).body
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
            head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (head, h11.Data(data=bytes(body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
