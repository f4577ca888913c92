"""A client that costs little: a connection per request, bytes in and bytes out."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    head: bytes
    body: bytes
    took_s: float  # from connecting to the last byte
    first_s: float  # to the first one


async def exchange(port: int, fields: dict[str, Any], path: str = "/v1/completions") -> Reply:
    """POST and read until the server closes.  An answer that breaks off raises."""
    raw = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    started_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + raw)
        first = await reader.readuntil(b"\r\n\r\n")
        first_s = time.monotonic() - started_s
        body = await reader.read()
    finally:
        writer.close()
    return Reply(int(first[9:12]), first, body, time.monotonic() - started_s, first_s)
