"""The files of a batch: requests as OpenAI's batch format has them, and answers of which each is written exactly once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagestream.engine import StartError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """One by one, whatever the file's size.  Raises StartError naming the line."""
    try:
        lines = path.open("rb")
    except OSError as error:
        raise StartError(f"{path} can't be read: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse_request(line, f"{path}, line {number}")


def parse_request(line: bytes, where: str) -> BatchRequest:
    try:
        entry = json.loads(line)
    except ValueError:
        raise StartError(f"{where}: no JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str) or not isinstance(entry.get("body"), dict):
        raise StartError(f"{where}: needs custom_id, a text, and body, an object")
    if entry.get("method", "POST") != "POST" or entry.get("url") not in URLS:
        raise StartError(f"{where}: method must be POST, and url one of {', '.join(URLS)}")
    if entry["body"].get("stream"):
        raise StartError(f"{where}: an answer of a batch can't be streamed")
    return BatchRequest(entry["custom_id"], entry["url"], entry["body"])


def digest(custom_id: str) -> bytes:
    """Stands for an id in memory: 16 bytes, however long it is."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def count_requests(path: Path) -> int:
    """Raises StartError for a line that is no request, or an id that comes twice: no answer could be told from the other."""
    seen: set[bytes] = set()
    for request in read_requests(path):
        if (mark := digest(request.custom_id)) in seen:
            raise StartError(f"{path}: custom_id {request.custom_id!r} comes twice")
        seen.add(mark)
    return len(seen)


class Answers:
    """The output file, held by one process at a time.  What it has at the start was answered by an earlier run."""

    def __init__(self, path: Path):
        """Raises StartError.  Half a line, from a run that was killed while it wrote, is cut off."""
        self._path = path
        try:
            self._file: BinaryIO = path.open("a+b", buffering=0)  # type: ignore[assignment]  # unbuffered, so a raw file
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another run writes to {path}") from None
        except OSError as error:
            raise StartError(f"{path} can't be written: {error.strerror}") from None
        self._done = self._read(path)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __len__(self) -> int:
        return len(self._done)

    def has(self, custom_id: str) -> bool:
        return digest(custom_id) in self._done

    def add(self, custom_id: str, answer: dict[str, Any]) -> None:
        # ASCII, so that no reader's idea of a line break can split it.
        line = json.dumps({**answer, "custom_id": custom_id}).encode("ascii") + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            raise StartError(f"{self._path} can't be written: {error.strerror}; what it holds is kept") from None
        self._done.add(digest(custom_id))

    def _read(self, path: Path) -> set[bytes]:
        done: set[bytes] = set()
        end = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(digest(json.loads(line)["custom_id"]))
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise StartError(f"{path} holds a line that is no answer of a batch; it is left as it is") from None
                end += len(line)
        os.truncate(self._file.fileno(), end)
        return done
