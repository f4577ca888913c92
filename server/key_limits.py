"""What one API key may take: requests at a time, and tokens per minute.  Off unless the operator sets a limit."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from starlette.types import Scope

from pagestream.server.errors import HttpError, seconds
from pagestream.server.state import server_state

WINDOW_S = 60.0


@dataclass(slots=True)
class Account:
    """Of one key.  Remembers one minute, also where nobody asks what was spent."""

    num_running: int = 0
    spent: deque[tuple[float, int]] = field(default_factory=deque)  # when a request ended, and its tokens
    _num_tokens: int = 0  # of all that is in `spent`

    def spend(self, now_s: float, num_tokens: int) -> None:
        self._forget(now_s)
        self.spent.append((now_s, num_tokens))
        self._num_tokens += num_tokens

    def num_tokens(self, now_s: float) -> int:
        """Within the last minute."""
        self._forget(now_s)
        return self._num_tokens

    def _forget(self, now_s: float) -> None:
        while self.spent and now_s - self.spent[0][0] > WINDOW_S:
            self._num_tokens -= self.spent.popleft()[1]


class Lease:
    """One running request of a key; given back once, with the tokens that it took."""

    def __init__(self, account: Account, clock: Callable[[], float]):
        self._account = account
        self._clock = clock
        self._is_open = True
        account.num_running += 1

    def give_back(self, num_tokens: int) -> None:
        """Nothing the second time."""
        if self._is_open:
            self._is_open = False
            self._account.num_running -= 1
            if num_tokens:
                self._account.spend(self._clock(), num_tokens)


class KeyLimits:
    """Keeps keys by their hashes only.  Without configured keys, all requests share one account."""

    def __init__(
        self, max_running: int | None, max_tokens_per_minute: int | None, clock: Callable[[], float] = time.monotonic
    ):
        self._max_running = max_running
        self._max_tokens = max_tokens_per_minute
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def take(self, owner: str) -> Lease:
        """Raises HttpError (429) where a limit is reached."""
        account = self._accounts.setdefault(owner, Account())
        if self._max_running is not None and account.num_running >= self._max_running:
            raise refusal(f"as many requests of this key are running as it may have at a time: {self._max_running}", 1.0)
        now_s = self._clock()
        if self._max_tokens is not None and account.num_tokens(now_s) >= self._max_tokens:
            wait_s = WINDOW_S - (now_s - account.spent[0][0])
            raise refusal(f"this key has used its {self._max_tokens} tokens of the last minute", wait_s)
        return Lease(account, self._clock)


def refusal(message: str, retry_after_s: float) -> HttpError:
    return HttpError(429, message, code="rate_limit_exceeded", headers={"Retry-After": seconds(retry_after_s)})


def owner_of(http: Request) -> str:
    """Who pays: the hash of the key that was let in."""
    if not server_state(http).settings.api_keys:
        return ""
    return hashlib.sha256(given_key(http.scope)).hexdigest()


def given_key(scope: Scope) -> bytes:
    """The key alone, so that it is one whatever header it comes in and however that is written; empty for none."""
    headers = dict(scope["headers"])
    kind, _, given = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")  # where clients of Anthropic's API put it
    return given.strip()
