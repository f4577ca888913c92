"""The options of `pagestream serve`: names and sizes as vLLM's users know them; each is also an environment variable."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from pagestream.engine import EngineArgs, StartError
from pagestream.server.settings import MIB, ServerSettings, Tls
from pagestream.server.tools.plan import Parsers
from pagestream.server.tools.syntax import SYNTAXES

MODEL, CACHE, PREFIXES, SCHEDULING, DEVICE = "Model", "KV cache", "Prefix cache", "Scheduling", "Device"
SERVER, CLIENTS, STREAMS, OPERATION, PAGE, TESTING = "Server", "Clients", "Streams", "Operation", "Page", "Testing"
SECONDS = ("sse_keep_alive_interval", "drain_timeout", "slow_reader_timeout", "slow_sender_timeout", "stall_timeout", "stream_resume_timeout", "stream_keep")
PER_KEY = ("max_requests_per_key", "max_tokens_per_minute_per_key")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+")  # anything else, a closing slash too, would never be equal to one

OTHER_VARIABLES = frozenset({"PAGESTREAM_CACHE", "PAGESTREAM_URL"})  # not of `serve`
SERVICE_LINK = re.compile(r"PAGESTREAM_(SERVICE|PORT)_.*")  # what Kubernetes sets where a service has our name

log = logging.getLogger(__name__)

# As vLLM reads them: 32k is 32,000 and 32K is 32,768.
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
BYTE_UNITS = {"": 2**30, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def count(text: object) -> int:
    """8192, 8k or 8K; an option's default comes as a number.  Raises BadParameter."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmgKMG]?)", str(text).strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a count such as 8192, 8k (8,000) or 8K (8,192)")
    return int(float(found[1]) * COUNT_UNITS[found[2]])


def gib(text: object) -> float:
    """Gibibytes: 2, 1.5, 512M or 2GiB; that they may not be negative is said with the other limits.  Raises BadParameter."""
    found = re.fullmatch(r"(-?[0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", str(text).strip().lower())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a size such as 2 (GiB), 1.5G or 512M")
    return float(found[1]) * BYTE_UNITS[found[2]] / 2**30


def option(flag: str, panel: str, text: str, **more: Any) -> Any:
    """One option, in its group of the help, with its environment variable, for which a narrow terminal has no room."""
    variable = variable_of(flag.split("/")[0].removeprefix("--").replace("-", "_"))
    return typer.Option(flag, envvar=variable, show_envvar=False, help=text, rich_help_panel=panel, **more)


def variable_of(name: str) -> str:
    return f"PAGESTREAM_{name.upper()}"


def warn_of_unknown_variables(names: Iterable[str], options: Iterable[str]) -> None:
    """Of the environment's, those that look like an option's and are none: a slip there would else go unseen."""
    known = {variable_of(option) for option in options} | OTHER_VARIABLES
    for name in sorted(names):
        if name.startswith("PAGESTREAM_") and name not in known and not SERVICE_LINK.fullmatch(name):
            near = difflib.get_close_matches(name, known, n=1)
            log.warning("%s is set, and no option has this variable%s", name, f"; did you mean {near[0]}?" if near else "")


def counted(flag: str, panel: str, text: str) -> Any:
    return option(flag, panel, text, parser=count, metavar="COUNT")


def sized(flag: str, panel: str, text: str) -> Any:
    return option(flag, panel, text, parser=gib, metavar="GIB")


ServedNames = Annotated[
    list[str] | None,
    option("--served-model-name", SERVER, "Name in requests and answers; may be repeated. Default: the model as given.", metavar="NAME"),
]
ApiKeys = Annotated[
    list[str] | None,
    option("--api-key", CLIENTS, "Ask for this key on all routes but the page, its files and those of operation; may be repeated.", metavar="KEY"),
]
Origins = Annotated[
    list[str] | None,
    option("--allowed-origins", CLIENTS, "Origin whose pages may call this server, or *; may be repeated.", metavar="ORIGIN"),
]


def keys_in(path: str | None) -> list[str]:
    """One key a line; empty lines and those that begin with # are none.  Raises StartError, also for a file without any."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"--api-key-file {path} can't be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise StartError(f"--api-key-file {path} holds no key")
    return keys


def to_tls(options: dict[str, Any]) -> Tls | None:
    """Raises StartError for a key or an authority without a certificate."""
    certificate = options["ssl_certfile"]
    if certificate is None:
        if options["ssl_keyfile"] or options["ssl_ca_certs"]:
            raise StartError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    return Tls(certificate, options["ssl_keyfile"], options["ssl_ca_certs"])


ENGINE_OPTIONS = frozenset(field.name for field in fields(EngineArgs))


def to_engine_args(options: dict[str, Any]) -> EngineArgs:
    """Those of the options that are the engine's.  Raises StartError, also for a value that the engine could not use."""
    args = EngineArgs.from_options({name: value for name, value in options.items() if name in ENGINE_OPTIONS})
    args.to_config()
    return args


def to_settings(options: dict[str, Any]) -> ServerSettings:
    """Those of the options that are the server's.  Raises StartError for a value that makes no sense."""
    if not 0 < options["max_body_size"] < math.inf:
        raise StartError("--max-body-size must be above 0 and finite")
    for name in SECONDS:
        if not 0 <= options[name] < math.inf:  # also where it is no number
            raise StartError(f"--{name.replace('_', '-')} must be finite and not negative")
    memory = options["stream_memory"]
    if memory is not None and memory < 0:
        raise StartError("--stream-memory must not be negative")
    for name in PER_KEY:
        if options[name] is not None and options[name] < 1:
            raise StartError(f"--{name.replace('_', '-')} must be at least 1")
    for origin in options["allowed_origins"] or []:
        if not ORIGIN.fullmatch(origin):
            raise StartError(f"--allowed-origins takes * or origins as browsers send them, such as https://chat.example, not {origin!r}")
    root_path = options["root_path"].rstrip("/")
    if root_path and not root_path.startswith("/"):
        raise StartError("--root-path must begin with a slash")
    parsers = Parsers(options["tool_call_parser"], options["reasoning_parser"])
    if parsers.tool_calls not in ("auto", *SYNTAXES):
        raise StartError(f"--tool-call-parser must be auto, {', '.join(SYNTAXES)}, not {parsers.tool_calls!r}")
    if parsers.reasoning not in ("auto", "think", "none"):
        raise StartError(f"--reasoning-parser must be auto, think or none, not {parsers.reasoning!r}")
    names = [name for given in options["served_model_name"] or [] for name in given.split() if name]
    return ServerSettings(
        served_model_names=tuple(names or [options["model"]]),
        model=options["model"],
        api_keys=tuple(key for key in [*(options["api_key"] or []), *keys_in(options["api_key_file"])] if key),
        allowed_origins=tuple(options["allowed_origins"] or []),
        sse_keep_alive_interval_s=options["sse_keep_alive_interval"],
        max_body_bytes=int(options["max_body_size"] * MIB),
        drain_timeout_s=options["drain_timeout"],
        max_requests_per_key=options["max_requests_per_key"],
        max_tokens_per_minute_per_key=options["max_tokens_per_minute_per_key"],
        slow_reader_timeout_s=options["slow_reader_timeout"],
        slow_sender_timeout_s=options["slow_sender_timeout"],
        stall_timeout_s=options["stall_timeout"],
        stream_resume_timeout_s=options["stream_resume_timeout"],
        stream_keep_s=options["stream_keep"],
        stream_memory_bytes=64 * MIB if memory is None else int(memory * 1024 * MIB),
        ui=options["ui"],
        otlp_endpoint=options["otlp_endpoint"],
        parsers=parsers,
        root_path=root_path,
    )
