"""What the operator asked of the server, as far as it is not the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream.server.tools.plan import Parsers

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Files: a certificate chain, its key, and whose clients' certificates to ask for (none: nobody's)."""

    certificate: str
    key: str | None = None
    ca: str | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`served_model_names` has at least one name; the first stands in answers and metrics."""

    served_model_names: tuple[str, ...]
    model: str = ""  # what was loaded, shown as the root of the served names
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    allowed_origins: tuple[str, ...] = ()  # of browsers' cross-origin requests
    sse_keep_alive_interval_s: float = 15.0  # 0: no keep-alive
    max_body_bytes: int = 8 * MIB
    drain_timeout_s: float = 30.0
    max_requests_per_key: int | None = None  # at a time
    max_tokens_per_minute_per_key: int | None = None  # of prompts and answers
    slow_reader_timeout_s: float = 120.0  # a reader who takes nothing for so long is cut off; 0: never
    slow_sender_timeout_s: float = 60.0  # of a request's head, and of each MIN_BYTES_SENT of its body; 0: for ever
    stall_timeout_s: float = 60.0  # a step that takes longer turns readiness off and is reported; 0: never
    stream_resume_timeout_s: float = 60.0  # how long a resumable stream without a reader goes on
    stream_keep_s: float = 300.0  # how long a finished one can still be read
    stream_memory_bytes: int = 64 * MIB  # of all that is kept for resumption
    ui: bool = True  # the page at /
    otlp_endpoint: str | None = None  # of a collector of traces; None: nothing is traced
    parsers: Parsers = Parsers()
    root_path: str = ""  # what a proxy serves this server under

    @property
    def name(self) -> str:
        return self.served_model_names[0]
