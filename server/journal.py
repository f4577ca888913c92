"""What survives kill -9: admitted requests and the tokens they were given, in one SQLite file.

Written in batches by a thread of its own, so no step waits for it.  What a batch had not reached is no loss: an answer depends on
its request alone, so the tokens that are missing are generated again, the same ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestream.engine import RequestOutput, StartError
from pagestream.server.journal_file import JournalledAnswer, check_file, load, load_unfinished, lock, open_database, prune

if TYPE_CHECKING:
    from pagestream.engine import OutputStream
    from pagestream.server.answer import Answer

log = logging.getLogger(__name__)

BATCH_S = 0.02
PRUNE_EVERY = 1000  # answers
TRY_AGAIN_S = 1.0  # after the disk was full, or whatever else kept a batch from being written


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

    def __init__(self, path: Path, options: dict[str, Any]):
        """`options` are those of the engine and of READING.  Raises StartError, and then has left the file as it was."""
        self.path = path
        check_file(path)
        self._lock_fd = lock(path)
        try:
            self._database = open_database(path, options)
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_fd)
            raise StartError(f"the journal {path} can't be used: {error}") from None
        except StartError:
            os.close(self._lock_fd)
            raise
        self._inbox: queue.SimpleQueue[Callable[[Batch], None]] = queue.SimpleQueue()
        self._is_broken = False
        self._try_again_s = 0.0  # on the monotonic clock; only where it is broken
        self._lost: set[str] = set()  # requests of which something could not be written: with a hole in it, the rest is worth nothing
        self._num_since_prune = 0
        self._thread = threading.Thread(target=self._write_all, name="pagestream-journal", daemon=True)
        self._thread.start()

    # ---- writing ----------------------------------------------------------------------------------------------------

    def admitted(self, answer: Answer, streams: Sequence[OutputStream]) -> None:
        """Note an answer's requests.  Whatever an earlier engine made of them is forgotten: it will be told again."""
        request = answer.request
        # As the client wrote it; strings and lists of them serve alike in some fields.
        body = request.model_dump_json(exclude_unset=True, by_alias=True, warnings=False)
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
            self._write_or_lose(batch)
            for callback in batch.callbacks:
                callback()

    def _write_or_lose(self, batch: Batch) -> None:
        """What is lost is missing after a restart, and nothing else: what was written of a request before is its beginning."""
        self._lost.difference_update([row[0] for row in batch.requests])  # begun anew
        ended = [request_id for _, request_id in batch.ends]
        batch.tokens = {key: token_ids for key, token_ids in batch.tokens.items() if key[0] not in self._lost}
        batch.ends = [end for end in batch.ends if end[1] not in self._lost]
        if not self._is_written(batch):
            self._lost.update([row[0] for row in batch.requests], [request_id for request_id, _ in batch.tokens])
        self._lost.difference_update(ended)

    def _is_written(self, batch: Batch) -> bool:
        if self._is_broken and time.monotonic() < self._try_again_s:
            return False
        try:
            self._write(batch)
        except sqlite3.Error as error:
            if not self._is_broken:
                log.error("the journal %s can't be written: %s; trying again every %g s", self.path, error, TRY_AGAIN_S)
            self._is_broken, self._try_again_s = True, time.monotonic() + TRY_AGAIN_S
            return False
        if self._is_broken:
            log.warning("the journal %s is written again", self.path)
            self._is_broken = False
        return True

    def _write(self, batch: Batch) -> None:
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
        return load_unfinished(self.path)

    def load(self, answer_id: str) -> JournalledAnswer | None:
        return load(self.path, answer_id)
