"""What survives kill -9: admitted requests and the tokens they were given, in one SQLite file.

Written in batches by a thread of its own, so no step waits for it.  What a batch had not reached is no loss: an answer depends on
its request alone, so the tokens that are missing are generated again, the same ones.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestream.engine import RequestOutput, StartError

if TYPE_CHECKING:
    from pagestream.engine import OutputStream
    from pagestream.server.answer import Answer

log = logging.getLogger(__name__)

MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x70675354
VERSION = 1
BATCH_S = 0.02
MAX_KEPT_ANSWERS = 10_000
PRUNE_EVERY = 1000  # answers
# The options that tokens depend on.
BITS = ("model", "revision", "tokenizer", "dtype", "quantization", "load_format", "kv_cache_dtype", "kernels")

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
    def is_sound(self) -> bool:
        """Whether it can be given in full: it goes on, or ended as it should."""
        return all(request.finish_reason in (None, "stop", "length") for request in self.requests)


@dataclass(slots=True)
class Batch:
    """What one transaction writes."""

    answers: list[tuple[Any, ...]] = field(default_factory=list)
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    ends: list[tuple[str, str]] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    is_last: bool = False


class Journal:
    """One open file, which this process alone writes.  `admitted` and `outputs` return at once."""

    def __init__(self, path: Path, engine_args: dict[str, Any]):
        """Raises StartError, and then has left the file as it was."""
        self.path = path
        check_file(path)
        self._lock_fd = lock(path)
        try:
            self._database = open_database(path, engine_args)
        except (sqlite3.Error, StartError) as error:
            os.close(self._lock_fd)
            raise StartError(f"the journal {path} can't be used: {error}") from None
        self._inbox: queue.SimpleQueue[Callable[[Batch], None]] = queue.SimpleQueue()
        self._is_broken = False
        self._num_since_prune = 0
        self._thread = threading.Thread(target=self._write_all, name="pagestream-journal", daemon=True)
        self._thread.start()

    # ---- writing ----------------------------------------------------------------------------------------------------

    def admitted(self, answer: Answer, streams: Sequence[OutputStream]) -> None:
        """Note an answer's requests.  Whatever an earlier engine made of them is forgotten: it will be told again."""
        request = answer.request
        body = request.model_dump_json(exclude_unset=True, warnings=False)  # strings and lists of them serve alike in some fields
        answer_row = (
            answer.id, answer.object_name, answer.created, body, answer.timeout_s, request.wants_resumable, time.time()
        )  # fmt: skip
        rows = [
            (stream.request_id, answer.id, place, array("q", stream.prompt_token_ids).tobytes(), str(stream.seed), None)
            for place, stream in enumerate(streams)
        ]

        def put(batch: Batch) -> None:
            batch.answers.append(answer_row)
            batch.requests.extend(rows)

        self._inbox.put(put)

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        def put(batch: Batch) -> None:
            for output in outputs:
                for answer in output.outputs:
                    if answer.token_ids:
                        key = (output.request_id, answer.index)
                        batch.tokens.setdefault(key, array("q")).extend(answer.token_ids)
                if output.finished:
                    reason = output.outputs[0].finish_reason if output.outputs else None
                    batch.ends.append(("error" if reason is None else reason.value, output.request_id))

        self._inbox.put(put)

    async def written(self) -> None:
        """Until everything noted before is in the file."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        self._inbox.put(lambda batch: batch.callbacks.append(lambda: loop.call_soon_threadsafe(tell)))
        await done

    def close(self) -> None:
        """Write what is left."""
        self._inbox.put(lambda batch: setattr(batch, "is_last", True))
        self._thread.join()
        self._database.close()
        os.close(self._lock_fd)

    def _write_all(self) -> None:
        is_last = False
        while not is_last:
            batch = Batch()
            self._inbox.get()(batch)
            time.sleep(0 if batch.callbacks or batch.is_last else BATCH_S)
            while not self._inbox.empty():
                self._inbox.get()(batch)
            is_last = batch.is_last
            try:
                self._write(batch)
            except sqlite3.Error as error:
                if not self._is_broken:
                    log.error("the journal %s can't be written any more: %s", self.path, error)
                self._is_broken = True
            for callback in batch.callbacks:
                callback()

    def _write(self, batch: Batch) -> None:
        if self._is_broken:
            return
        with self._database as database:
            database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", batch.answers)
            database.executemany("DELETE FROM tokens WHERE request_id = ?", [(row[0],) for row in batch.requests])
            database.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?)", batch.requests)
            rows = [(request_id, index, token_ids.tobytes()) for (request_id, index), token_ids in batch.tokens.items()]
            database.executemany("INSERT INTO tokens VALUES (?, ?, ?)", rows)
            database.executemany("UPDATE requests SET finish_reason = ? WHERE id = ?", batch.ends)
            self._num_since_prune += len(batch.answers)
            if self._num_since_prune >= PRUNE_EVERY:
                self._num_since_prune = 0
                prune(database)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[JournalledAnswer]:
        """What was cut off and can be asked for: to be called before anything is written."""
        return read(
            self.path,
            "SELECT id FROM answers WHERE is_resumable AND id IN (SELECT answer_id FROM requests WHERE finish_reason IS NULL)",
        )

    def load(self, answer_id: str) -> JournalledAnswer | None:
        return load(self.path, answer_id)


def check_file(path: Path) -> None:
    """Raises StartError unless this is no file yet, or a journal of this version.  By its bytes alone: SQLite would write."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
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
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise StartError(f"the journal {path} is corrupt ({' '.join(verdict.split())[:200]}); it was left as it is. Give another file")


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


def open_database(path: Path, engine_args: dict[str, Any]) -> sqlite3.Connection:
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it will hold prompts
    database = sqlite3.connect(path, check_same_thread=False)
    if is_new:
        database.executescript(SCHEMA)
        database.execute("INSERT INTO meta VALUES ('engine_args', ?)", (json.dumps(engine_args),))
        database.commit()
    else:
        earlier = read_engine_args(database)
        for name in BITS:
            if earlier.get(name) != engine_args.get(name):
                database.close()
                raise StartError(
                    f"it was written with {name} {earlier.get(name)!r}, and this server has {engine_args.get(name)!r}; give another file"
                )
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


def read_engine_args(database: sqlite3.Connection) -> dict[str, Any]:
    (text,) = database.execute("SELECT value FROM meta WHERE name = 'engine_args'").fetchone()
    return json.loads(text)


def load(path: Path, answer_id: str) -> JournalledAnswer | None:
    found = read(path, "SELECT ?", answer_id)
    return found[0] if found else None


def read(path: Path, ids: str, *arguments: str) -> list[JournalledAnswer]:
    """The answers whose ids this query gives, by a connection of its own."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
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
