"""How log lines look: for people, or one JSON object each for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from pagestream.engine import StartError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("plain", "json")
# What every record has; anything else came with `extra` and is told as it is.
OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """One object a line, with the time in UTC, and whatever `extra` was logged with."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        told |= {name: value for name, value in vars(record).items() if name not in OWN}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def start_logging(level: str, log_format: str = "plain") -> None:
    """Raises StartError for a level or a format that does not exist."""
    if level.lower() not in LEVELS:
        raise StartError(f"--log-level must be debug, info, warning or error, not {level!r}")
    if log_format not in FORMATS:
        raise StartError(f"--log-format must be plain or json, not {log_format!r}")
    # No format of ours has them, and each costs every line a question to the system.
    logging.logProcesses = logging.logMultiprocessing = logging.logThreads = False
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler])
