"""Every exception that the engine raises on purpose.

EngineError
 ├─ StartError                      the operator can fix it: a flag, a file, an architecture; the command exits with code 2
 ├─ ClientError(param, code)        the caller can fix it; 4xx
 │   ├─ InvalidRequest              bad value, unknown name, bad schema                     400 / 404
 │   ├─ ContextLengthExceeded       prompt + max_tokens can never fit                       400
 │   ├─ Overloaded(retry_after_s)   queue full (429), draining or loading (503)
 │   └─ DeadlineExceeded            its time was over before it had anything                408
 └─ EngineFault                     our fault; 5xx
     ├─ RequestFailed               one request was found guilty of a failing step; the others go on
     ├─ EngineDead                  the loop stopped; every stream ends with it
     └─ InvariantBroken             a check of ours failed; never caught, always a bug
OutOfBlocks                         internal to core: control flow of the scheduler, must never leave it
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class StartError(EngineError):
    """The engine can't start as asked; the message is one line that says what to do."""


class ClientError(EngineError):
    """The caller can fix it.  `param` is the offending field of the request, `code` a stable machine-readable word."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(ClientError, ValueError):
    """A field has a value that can't be served.  Also a ValueError, for the callers of the offline API."""


class ContextLengthExceeded(ClientError, ValueError):
    """Prompt and answer together can never fit; waiting would not help."""

    def __init__(self, *, param: str, num_tokens: int, max_tokens: int, limit: int, limited_by: str = "the model's context length"):
        asked = f" and max_tokens is {max_tokens}, together {num_tokens + max_tokens}" if max_tokens else ""
        advice = "Shorten it." if num_tokens > limit else "Shorten the prompt or lower max_tokens."
        super().__init__(
            f"{param} has {num_tokens} token{'s' * (num_tokens != 1)}{asked}; {limited_by} is {limit} tokens. {advice}",
            param=param,
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class Overloaded(ClientError):
    """No room now; trying again after `retry_after_s` makes sense.  `draining` tells a full queue from a server that ends."""

    def __init__(self, message: str, *, retry_after_s: float, draining: bool = False):
        super().__init__(message, code="server_draining" if draining else "server_overloaded")
        self.retry_after_s = retry_after_s
        self.draining = draining


class DeadlineExceeded(ClientError):
    """The time that the caller gave was over before there was anything to give back."""

    def __init__(self, timeout_s: float):
        super().__init__(
            f"nothing was generated within timeout_s, which is {timeout_s:g}", param="timeout_s", code="deadline_exceeded"
        )


class EngineFault(EngineError):
    """Our fault, not the caller's."""


class RequestFailed(EngineFault):
    """A step could not be computed with this request in it, and could without."""


class EngineDead(EngineFault):
    """The step loop has ended; no request can be served any more."""


class InvariantBroken(EngineFault):
    """A check of our own failed: a bug."""


class OutOfBlocks(Exception):
    """The pool can't give the blocks asked for; nothing was changed."""
