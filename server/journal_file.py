"""The journal's file: what is in it, and when it is taken for one."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from array import array
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream.engine import StartError

MAGIC = b"SQLite format 3\0"
DEADLINE = "deadline"  # among the reasons why a request ended
APPLICATION_ID = 0x70675354
VERSION = 1
MAX_KEPT_ANSWERS = 10_000
# The options that tokens depend on, and those that an answer's events do: who comes back knows how many of them he has had.
BITS = ("model", "revision", "tokenizer", "dtype", "quantization", "load_format", "kv_cache_dtype", "kernels")
READING = ("chat_template", "tool_call_parser", "reasoning_parser")

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE answers (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, created INTEGER NOT NULL, body TEXT NOT NULL, timeout_s REAL,
    is_resumable INTEGER NOT NULL, at_s REAL NOT NULL
);
CREATE TABLE requests (
    id TEXT PRIMARY KEY, answer_id TEXT NOT NULL REFERENCES answers (id), place INTEGER NOT NULL, prompt BLOB NOT NULL,
    seed TEXT NOT NULL, finish_reason TEXT
);
CREATE INDEX requests_by_answer ON requests (answer_id);
CREATE TABLE tokens (request_id TEXT NOT NULL, answer_index INTEGER NOT NULL, token_ids BLOB NOT NULL);
CREATE INDEX tokens_by_request ON tokens (request_id);
"""


@dataclass(frozen=True, slots=True)
class JournalledRequest:
    """One prompt of an answer.  `seed` is the one that it was computed with, drawn or asked for."""

    id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    finish_reason: str | None
    token_ids: dict[int, tuple[int, ...]]  # so far, by the answer's index


@dataclass(frozen=True, slots=True)
class JournalledAnswer:
    id: str
    kind: str  # the object name of its whole answer
    created: int
    body: dict[str, Any]
    timeout_s: float | None
    is_resumable: bool
    at_s: float  # of the wall clock
    requests: tuple[JournalledRequest, ...]

    @property
    def is_cut_off(self) -> bool:
        return any(request.finish_reason is None for request in self.requests)

    @property
    def is_sound(self) -> bool:
        """Whether it can be given in full: it goes on, or ended as it should."""
        return all(request.finish_reason in (None, "stop", "length", DEADLINE) for request in self.requests)


def check_file(path: Path) -> None:
    """Raises StartError unless this is no file yet, or a journal of this version.  By its bytes alone: SQLite would write."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise StartError(f"the journal's folder {path.parent} does not exist") from None
        return
    except OSError as error:
        raise StartError(f"the journal {path} can't be read: {error.strerror}") from None
    if not head:
        return
    if len(head) < 100 or not head.startswith(MAGIC) or int.from_bytes(head[68:72], "big") != APPLICATION_ID:
        raise StartError(f"{path} is no journal of pagestream; it was left as it is. Give another file")
    if int.from_bytes(head[60:64], "big") != VERSION:
        raise StartError(f"the journal {path} is of another version of pagestream; it was left as it is. Give another file")
    try:
        with reading(path) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise StartError(f"the journal {path} is corrupt ({' '.join(verdict.split())[:200]}); it was left as it is. Give another file")


def reading(path: Path) -> AbstractContextManager[sqlite3.Connection]:
    """A connection that can change nothing."""
    return closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True))


def check_usable(path: Path, options: dict[str, Any]) -> None:
    """Whether a journal with these options can be opened, without making one.  Raises StartError."""
    check_file(path)
    os.close(lock(path))
    if not path.exists() or path.stat().st_size == 0:
        return
    if not os.access(path, os.W_OK):
        raise StartError(f"the journal {path} can't be written")
    with reading(path) as database:
        check_options(path, database, options)


def lock(path: Path) -> int:
    """Hold the journal for this process, until its descriptor is closed.  Raises StartError."""
    name = f"{path}.lock"
    try:
        fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StartError(f"the journal's lock {name} can't be made: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise StartError(f"the journal {path} is in use by another process") from None
    return fd


def open_database(path: Path, options: dict[str, Any]) -> sqlite3.Connection:
    """`options` are those of the engine and of READING.  Raises StartError."""
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it will hold prompts
    database = sqlite3.connect(path, check_same_thread=False)
    if is_new:
        database.executescript(SCHEMA)
        database.execute("INSERT INTO meta VALUES ('engine_args', ?)", (json.dumps(options),))
        database.commit()
    else:
        try:
            check_options(path, database, options)
        except StartError:
            database.close()
            raise
    # A killed process loses nothing of what was committed; only the machine's own end could, and that would be generated again.
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    with database:
        prune(database)
    return database


def prune(database: sqlite3.Connection, max_kept: int = MAX_KEPT_ANSWERS) -> None:
    """Forget the oldest answers above so many, with all that is theirs."""
    database.execute("DELETE FROM answers WHERE id IN (SELECT id FROM answers ORDER BY at_s DESC LIMIT -1 OFFSET ?)", (max_kept,))
    database.execute("DELETE FROM requests WHERE answer_id NOT IN (SELECT id FROM answers)")
    database.execute("DELETE FROM tokens WHERE request_id NOT IN (SELECT id FROM requests)")


def check_options(path: Path, database: sqlite3.Connection, options: dict[str, Any]) -> None:
    """Raises StartError where what is in there would go on otherwise than it began."""
    earlier = read_options(database)
    for name in (*BITS, *READING):
        if name in earlier and earlier[name] != options.get(name):
            had, has = earlier[name], options.get(name)
            raise StartError(
                f"the journal {path} was written with {name} {had!r}, and this server has {has!r}; it was left as it is. Give another file"
            )


def read_options(database: sqlite3.Connection) -> dict[str, Any]:
    (text,) = database.execute("SELECT value FROM meta WHERE name = 'engine_args'").fetchone()
    return json.loads(text)


def load(path: Path, answer_id: str) -> JournalledAnswer | None:
    found = read(path, "SELECT ?", answer_id)
    return found[0] if found else None


def load_unfinished(path: Path) -> list[JournalledAnswer]:
    """What was cut off and can be asked for."""
    return read(
        path,
        "SELECT id FROM answers WHERE is_resumable AND id IN (SELECT answer_id FROM requests WHERE finish_reason IS NULL)",
    )


def read(path: Path, ids: str, *arguments: str) -> list[JournalledAnswer]:
    """The answers whose ids this query gives, by a connection of its own."""
    with reading(path) as database:
        rows = database.execute(f"SELECT * FROM answers WHERE id IN ({ids}) ORDER BY at_s", arguments).fetchall()
        return [
            JournalledAnswer(
                id=row[0],
                kind=row[1],
                created=row[2],
                body=json.loads(row[3]),
                timeout_s=row[4],
                is_resumable=bool(row[5]),
                at_s=row[6],
                requests=tuple(read_requests(database, row[0])),
            )
            for row in rows
        ]


def read_requests(database: sqlite3.Connection, answer_id: str) -> list[JournalledRequest]:
    found = []
    query = "SELECT id, prompt, seed, finish_reason FROM requests WHERE answer_id = ? ORDER BY place"
    for request_id, prompt, seed, finish_reason in database.execute(query, (answer_id,)).fetchall():
        token_ids: dict[int, tuple[int, ...]] = {}
        pieces = database.execute("SELECT answer_index, token_ids FROM tokens WHERE request_id = ? ORDER BY rowid", (request_id,))
        for index, piece in pieces:
            token_ids[index] = token_ids.get(index, ()) + numbers(piece)
        found.append(JournalledRequest(request_id, numbers(prompt), int(seed), finish_reason, token_ids))
    return found


def numbers(blob: bytes) -> tuple[int, ...]:
    values = array("q")
    values.frombytes(blob)
    return tuple(values)
