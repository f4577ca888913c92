"""Running the application under uvicorn: the socket, the signals, the drain, the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from pagestream.engine import StartError
from pagestream.server.http_protocol import protocol_for
from pagestream.server.settings import ServerSettings, Tls

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

# After the engine has ended or a drain has run out: for the last bytes, error events included, to reach their readers.
LAST_BYTES_S = 2
BACKLOG = 2048
OTHER_PORT = "; --port takes another"
KEEP_ALIVE_S = 65  # above the 60 s of common proxies, so that it is not the server who closes a connection just taken


def bind(host: str, port: int, slow_reader_timeout_s: float = 0.0) -> socket.socket:
    """A bound socket that does not listen yet: a port in use is found before a model is loaded, and nobody waits unanswered.

    Raises StartError.
    """
    if not host:
        raise StartError("--host must not be empty; 0.0.0.0 is every interface")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: only then does asyncio send small chunks at once (TCP_NODELAY) on what it accepts.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if slow_reader_timeout_s > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Inherited by what it accepts: a peer that takes nothing for so long loses its connection and its buffers too.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(slow_reader_timeout_s * 1000))
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = OTHER_PORT if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise StartError(f"can't listen on {host}:{port}: {reason}{hint}") from None
    return bound


def listen(bound: socket.socket) -> None:
    """From now on whoever connects is served, if only once the application has started.

    Raises StartError where another server was bound to the same address meanwhile, which is possible until one listens.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"can't listen on {shown_address(bound)}: {error.strerror}{OTHER_PORT}") from None


def shown_address(bound: socket.socket) -> str:
    address = bound.getsockname()
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def bind_unix(path: str) -> socket.socket:
    """The same on a Unix socket.  Takes the place of a socket that nobody listens on any more.  Raises StartError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not is_served(path):
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        bound.close()
        raise StartError(f"can't listen on {path}: {error.strerror}") from None
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise StartError(f"can't listen on {path}: {error.strerror or error}") from None
    return bound


def is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def check_tls(tls: Tls) -> None:
    """Before a model is loaded.  Raises StartError."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except OSError as error:  # what ssl raises is one too
        raise StartError(f"the certificate, its key or --ssl-ca-certs can't be used: {error.strerror or error}") from None


class DrainingServer(uvicorn.Server):
    """Keeps serving while it drains.

    Unlike uvicorn, whose first signal closes the listening socket, and unlike sse-starlette, which then cancels the streams:
    a load balancer must still be told that this server is not ready, a client must be told to go elsewhere, and streams have
    until the drain timeout.  A second signal ends the process at once.
    """

    def __init__(self, app: FastAPI, engine: AsyncLLMEngine, settings: ServerSettings, tls: Tls | None = None):
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            # Not whatever happens to be installed: httptools puts no bound on a request's head, and answers other errors.
            http=protocol_for(app),  # type: ignore[arg-type]
            loop="asyncio",
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
            ssl_ca_certs=None if tls is None else tls.ca,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls is not None and tls.ca is not None else ssl.CERT_NONE,
        )
        super().__init__(config)
        self.engine = engine
        self.drain_timeout_s = settings.drain_timeout_s
        self.exit_code = 0
        self._is_signalled = False
        self._draining: asyncio.Task[None] | None = None  # held, since a loop keeps weak references only

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        # Not the loop's own handlers: a step that hangs may hold the loop up, and the second signal must end even that.
        # Not a bound method either: by its `__self__` sse-starlette would find this server, and cut its streams at the end.
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._is_signalled:
                os.write(2, b"pagestream: second signal, ending at once\n")
                os._exit(128 + number)
            self._is_signalled = True
            loop.call_soon_threadsafe(self.begin_drain)

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def begin_drain(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self.drain())

    async def drain(self) -> None:
        log.info("draining: no new requests, at most %.0f s for those that run", self.drain_timeout_s)
        start_s = time.monotonic()
        is_drained = await self.engine.drain(self.drain_timeout_s)
        if self.engine.is_dead:
            log.error("the engine has ended while it drained")
            self.exit_code = 1
        elif not is_drained:
            log.warning("the drain timeout is over; what still runs is ended")
            await self.engine.stop()
        left_s = self.drain_timeout_s - (time.monotonic() - start_s)
        self.end(left_s)

    def end(self, left_s: float) -> None:
        """Close the listening socket and wait at most so long for the readers of what was already computed."""
        self.config.timeout_graceful_shutdown = max(LAST_BYTES_S, math.ceil(left_s))
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.engine.is_dead and not self._is_signalled and not self.should_exit:
            log.error("the engine has ended; so does the server")
            self.exit_code = 1
            self.end(0)
        return await super().on_tick(counter)


def serve_until_ended(
    app: FastAPI, engine: AsyncLLMEngine, bound: socket.socket, settings: ServerSettings, tls: Tls | None = None
) -> int:
    """Serve until a signal or the engine's end; returns the exit code, which is 0 after a drain only."""
    server = DrainingServer(app, engine, settings, tls)
    spare_heap()
    asyncio.run(server.serve(sockets=[bound]))
    return server.exit_code if server.started else 1


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For a start: what modules, a vocabulary and weights leave behind stays, and looking for garbage in it costs a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_heap() -> None:
    """Take what was loaded so far out of the garbage collector's sight: it lives to the end.

    A full collection would walk hundreds of thousands of objects and hold up every thread for a tenth of a second: steps,
    streams, refusals and probes.
    """
    gc.collect()
    gc.freeze()
