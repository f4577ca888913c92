"""The journal: kill -9 and resume, replay, and files that are none."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs, StartError
from pagestream.server import journal as journal_module
from pagestream.server.journal import Journal
from pagestream.server.journal_file import check_usable, load, prune
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, refusal_of, served
from tests.server.spawning import ROOT, Spawned, serving
from tests.server.test_resumable import RESUMABLE, parsed, resume, told

STORY = {"prompt": "the quick brown fox", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
REQUESTS = [
    STORY,
    {**STORY, "prompt": "a lazy dog", "temperature": 1, "seed": 3},
    {**STORY, "prompt": ["one", "two"], "n": 2, "temperature": 1, "seed": 4, "max_tokens": 100},
    {**STORY, "prompt": "with scores", "logprobs": 2},
    {**STORY, "prompt": "with an echo", "echo": True, "frequency_penalty": 0.5},
    {**STORY, "prompt": "ends soon", "max_tokens": 5},
    {**STORY, "prompt": "never seen before", "temperature": 1},
    {**STORY, "prompt": "the quick brown fox", "stop": ["zzzzzz"], "repetition_penalty": 1.1},
]


def with_journal(model: Path, journal: Path) -> AbstractContextManager[Spawned]:
    return serving(model, "--num-kv-blocks", "256", "--journal", str(journal), "--enable-fault-injection")


LONGEST_LIFE_S = 0.6  # from when all have begun to the kill: some are at their end by then


class Reader:
    """One client: everything it has had, over all its connections."""

    def __init__(self, fields: dict):
        self.fields = fields
        self.events: list[tuple[str, str]] = []
        self.has_begun = threading.Event()

    def begin(self, client: httpx.Client) -> None:
        """Read until the end, or until the server is gone."""
        raw = b""
        with contextlib.suppress(httpx.TransportError), client.stream(
            "POST", "/v1/completions", json={"model": "m", **self.fields, **RESUMABLE}
        ) as response:
            for piece in response.iter_raw():
                raw += piece
                if b"\n\n" in raw:
                    self.has_begun.set()
        self.events = parsed(raw)

    def go_on(self, client: httpx.Client) -> None:
        stream_id = json.loads(self.events[0][1])["id"]
        response = client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": self.events[-1][0]})
        assert response.status_code in (200, 204), response.text
        self.events += parsed(response.content)


def kill_and_resume(model: Path, journal: Path, num_kills: int, seed: int) -> None:
    """Kill the server at random moments while all eight streams are open: each of them must be complete afterwards, and the same."""
    choose = random.Random(seed)
    num_cut_off = 0
    with ExitStack() as stack:
        server = stack.enter_context(with_journal(model, journal))
        whole = [told(parsed(server.client.post("/v1/completions", json={"model": "m", **fields, **RESUMABLE}).content)) for fields in REQUESTS]
        for _ in range(num_kills):
            readers = [Reader(fields) for fields in REQUESTS]
            with ThreadPoolExecutor(len(readers)) as pool:
                begun = [pool.submit(reader.begin, server.client) for reader in readers]
                assert all(reader.has_begun.wait(60) for reader in readers)
                time.sleep(choose.random() * LONGEST_LIFE_S)
                server.process.send_signal(signal.SIGKILL)
                for each in begun:
                    each.result()
            stack.close()
            num_cut_off += sum(told(reader.events)[1][-1:] != ["done"] for reader in readers)
            server = stack.enter_context(with_journal(model, journal))
            with ThreadPoolExecutor(len(readers)) as pool:
                list(pool.map(lambda reader, client=server.client: reader.go_on(client), readers))
            for reader in readers:
                expected = whole[REQUESTS.index(reader.fields)]
                if reader.fields.get("seed") is None and reader.fields["temperature"] == 1:
                    lanes, common = told(reader.events)
                    assert lanes[0][-1]["finish_reason"] == "length"
                    assert common[-1] == "done"
                else:
                    assert told(reader.events) == expected, reader.fields
    assert num_cut_off >= num_kills, "the kills came too late"
    ids = [json.loads(reader.events[0][1])["id"] for reader in readers]
    command = [sys.executable, "-m", "pagestream.server", "replay", ids[-1], "--journal", str(journal)]
    replayed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (replayed.returncode, "the bits match" in replayed.stdout) == (0, True), replayed.stdout + replayed.stderr


def test_a_killed_servers_streams_go_on_to_the_same_tokens(tiny_llama, tmp_path):
    kill_and_resume(tiny_llama, tmp_path / "journal", 1, seed=1)


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tiny_llama, tmp_path):
    kill_and_resume(tiny_llama, tmp_path / "journal", 20, seed=2)


@contextlib.contextmanager
def served_with(model: Path, path: Path) -> Iterator:
    args = {"model": str(model), "num_kv_blocks": 128, "cpu_threads": 1, "enable_fault_injection": True}
    metrics = Metrics("m")
    with served(AsyncLLMEngine.from_engine_args(EngineArgs(**args), metrics), metrics, Journal(path, args)) as live:
        yield live


def test_what_was_finished_can_be_read_after_a_restart(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        streams = [parsed(live.complete(**fields, **RESUMABLE).content) for fields in REQUESTS]
        chat = parsed(live.chat("Hello", max_tokens=20, temperature=1, **RESUMABLE).content)
        plain = live.complete(**STORY).json()["id"]
    with served_with(tiny_llama, path) as live:
        for whole in [*streams, chat]:
            stream_id = json.loads(whole[0][1])["id"]
            cut = len(whole) // 2
            assert told(whole[:cut] + resume(live, stream_id, whole[cut - 1][0])) == told(whole)
        refusal_of(live.client.get(f"/v1/streams/{plain}"), 404)
    record = load(path, plain)
    assert record is not None
    assert len(record.requests[0].token_ids[0]) == 300


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 20, "maxLength": 40}}, "required": ["a"]}
STRUCTURED = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": "required"},
}


def as_if_cut_off(path: Path) -> None:
    """Take the ends from what a journal has, as if the server had been killed right before them."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE requests SET finish_reason = NULL")


@pytest.mark.parametrize("kind", STRUCTURED)
def test_a_structured_answer_goes_on_after_a_restart(tiny_llama, tmp_path, kind):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        response = live.chat(max_tokens=100, temperature=1, seed=1, **STRUCTURED[kind], **RESUMABLE)
        whole = parsed(response.content)
        assert response.status_code == 200
    as_if_cut_off(path)
    with served_with(tiny_llama, path) as live:
        assert [texts(resume(live, json.loads(whole[0][1])["id"], None))] == [texts(whole)]


def texts(events: list[tuple[str, str]]) -> str:
    """What an answer's deltas say together, the ids of calls aside, which are drawn anew."""
    choices = [choice for _, data in events[:-1] for choice in json.loads(data)["choices"]]
    calls = [call["function"].get("arguments", "") for choice in choices for call in choice["delta"].get("tool_calls", ())]
    return "".join([*(choice["delta"].get("content", "") for choice in choices), *calls])


def test_a_stream_that_the_servers_end_cut_off_goes_on_from_the_last_id_it_had(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    slow = {"kind": "slow", "at_token": 20, "seconds": 0.5}
    with served_with(tiny_llama, path) as live:
        whole = told(parsed(live.complete(**STORY, **RESUMABLE).content))
        stopping, raw = None, b""
        body = {"model": "m", **STORY, **RESUMABLE, "x_fault": slow}
        with live.client.stream("POST", "/v1/completions", json=body) as response:
            for piece in response.iter_raw():
                stopping = stopping or asyncio.run_coroutine_threadsafe(live.engine.stop(), live.loop)
                raw += piece
        assert stopping is not None
        stopping.result(60)
    begun = raw[: raw.rindex(b"\n\n", 0, raw.index(b'data: {"error"')) + 2]
    ids = [line[4:] for line in raw.decode().split("\n") if line.startswith("id: ")]
    assert ids[-1] == parsed(begun)[-1][0]
    with served_with(tiny_llama, path) as live:
        assert told(parsed(begun) + resume(live, json.loads(parsed(begun)[0][1])["id"], ids[-1])) == whole


def test_an_answer_whose_time_is_over_meanwhile_ends_with_what_there_is(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        whole = parsed(live.complete(**STORY, timeout_s=3600, **RESUMABLE).content)
        stream_id = json.loads(whole[0][1])["id"]
    as_if_cut_off(path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM tokens WHERE rowid > (SELECT min(rowid) FROM tokens)")
        database.execute("UPDATE tokens SET token_ids = substr(token_ids, 1, 8 * 10)")
        database.execute("UPDATE answers SET at_s = at_s - 3600")
    with served_with(tiny_llama, path) as live:
        *choices, last = told(resume(live, stream_id, None))[0][0]
        assert choices
        assert choices == told(whole)[0][0][: len(choices)]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", "deadline")


@pytest.mark.parametrize("fields", [{}, {"prompt": ["one", "two"]}, {"include_timeline": True}], ids=["one", "two", "timeline"])
def test_what_a_deadline_ended_can_be_read_after_a_restart(tiny_llama, tmp_path, fields):
    path = tmp_path / "journal"
    slow = {"kind": "slow", "at_token": 20, "seconds": 2.0}
    with served_with(tiny_llama, path) as live:
        whole = parsed(live.complete(**{**STORY, **fields}, timeout_s=1.0, x_fault=slow, **RESUMABLE).content)
        scored = parsed(live.complete(**STORY, logprobs=1, timeout_s=1.0, x_fault=slow, **RESUMABLE).content)
        live.until(lambda: live.engine.stats().num_running == 0, "the slow step has ended")
    assert json.loads(whole[-3][1])["choices"][0]["stop_reason"] == "deadline"
    with served_with(tiny_llama, path) as live:
        stream_id, cut = json.loads(whole[0][1])["id"], len(whole) // 2
        assert told(resume(live, stream_id, None)) == told(whole)
        assert told(whole[:cut] + resume(live, stream_id, whole[cut - 1][0])) == told(whole)
        assert live.client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": whole[-1][0]}).status_code == 204
        # With scores it would have to be computed anew, and nothing says up to which token.
        refusal_of(live.client.get(f"/v1/streams/{json.loads(scored[0][1])['id']}"), 404)


def test_what_had_ended_in_time_is_given_in_full_however_late(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    fields = {**STORY, "max_tokens": 60, "logprobs": 1, "timeout_s": 3600}
    with served_with(tiny_llama, path) as live:
        whole = parsed(live.complete(**fields, **RESUMABLE).content)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE answers SET at_s = at_s - 7200")
    with served_with(tiny_llama, path) as live:
        assert told(resume(live, json.loads(whole[0][1])["id"], None)) == told(whole)
    as_if_cut_off(path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE answers SET at_s = at_s - 7200, timeout_s = 3600")
    with served_with(tiny_llama, path) as live:  # its time is over, and its scores are not in the journal
        refusal_of(live.client.get(f"/v1/streams/{json.loads(whole[0][1])['id']}"), 404)


def test_what_a_server_does_not_take_any_more_keeps_nothing_else_from_going_on(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        first, second = (parsed(live.complete(**STORY, **RESUMABLE).content) for _ in range(2))
    as_if_cut_off(path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        body = json.dumps({"model": "m", "prompt": ["a"], "of_another_version": 1})
        database.execute("UPDATE answers SET body = ? WHERE id = ?", (body, json.loads(first[0][1])["id"]))
    with served_with(tiny_llama, path) as live:
        assert told(resume(live, json.loads(second[0][1])["id"], None)) == told(second)


def test_what_its_client_left_does_not_come_back(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        sock = live.connect({**STORY, "stream": True, "x_fault": {"kind": "slow", "at_token": 3, "seconds": 0.2}})
        sock.recv(1)
        sock.close()
        live.until(lambda: live.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1, "aborted")
    with served_with(tiny_llama, path) as live:
        assert live.engine.stats().num_running == live.engine.stats().num_waiting == 0


@pytest.mark.parametrize("check", [Journal, check_usable])
@pytest.mark.parametrize("kind", ["text", "foreign", "corrupt", "other version", "other model", "other parser"])
def test_a_file_that_can_not_be_used_is_refused_and_left_as_it_is(tmp_path, kind, check):
    path = tmp_path / "journal"
    if kind == "text":
        path.write_text("something of somebody's " * 20)
    elif kind == "foreign":
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE mine (id)")
    else:
        Journal(path, {"model": "a", "tool_call_parser": "auto"}).close()
        raw = bytearray(path.read_bytes())
        if kind == "corrupt":
            raw[4096:] = b"\x5a" * (len(raw) - 4096)
        elif kind == "other version":
            raw[60:64] = (99).to_bytes(4, "big")
        path.write_bytes(raw)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(StartError, match=str(path)) as refused:
        check(path, {"model": "b" if kind == "other model" else "a", "tool_call_parser": "hermes" if kind == "other parser" else "auto"})
    assert "\n" not in str(refused.value)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("check", [Journal, check_usable])
def test_a_journal_belongs_to_one_process(tmp_path, check):
    first = Journal(tmp_path / "journal", {"model": "a"})
    with pytest.raises(StartError, match="in use"):
        check(tmp_path / "journal", {"model": "a"})
    first.close()
    check_usable(tmp_path / "journal", {"model": "a"})
    Journal(tmp_path / "journal", {"model": "a"}).close()


def test_the_oldest_answers_are_forgotten(tiny_llama, tmp_path):
    path = tmp_path / "journal"
    with served_with(tiny_llama, path) as live:
        ids = [live.complete(prompt="the", max_tokens=2).json()["id"] for _ in range(5)]
    with contextlib.closing(sqlite3.connect(path)) as database:
        with database:
            prune(database, 2)
        tables = ("answers", "requests", "tokens")
        assert [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] >= 2 for table in tables] == [True] * 3
        assert database.execute("SELECT count(*) FROM requests").fetchone() == (2,)
    assert [load(path, each) is not None for each in ids] == [False, False, False, True, True]


def test_a_full_disk_costs_what_could_not_be_written_and_no_more(tiny_llama, tmp_path, monkeypatch, caplog):
    path = tmp_path / "journal"
    monkeypatch.setattr(journal_module, "TRY_AGAIN_S", 0.0)

    def reason_of(answer_id: str) -> str | None:
        record = load(path, answer_id)
        return None if record is None else record.requests[0].finish_reason

    def written(live: Live) -> str:
        whole = parsed(live.complete(**STORY, **RESUMABLE).content)
        wholes.append(whole)
        return json.loads(whole[0][1])["id"]

    wholes: list[list[tuple[str, str]]] = []
    with served_with(tiny_llama, path) as live:
        slow = {"kind": "slow", "at_token": 20, "seconds": 1.0}
        sock = live.connect({**STORY, "x_fault": slow, **RESUMABLE})  # begins in time, and goes on while the disk is full
        live.until(lambda: live.metric("vllm:generation_tokens_total") >= 20, "begun")
        limit_pages(live, 1)
        ids = [written(live) for _ in range(5)]
        wholes.append(parsed(received(sock)))
        assert not all(reason_of(answer_id) for answer_id in ids), "the disk was full"
        limit_pages(live, 2**30)
        last = written(live)
        live.until(lambda: reason_of(last) == "length", "noted")
    assert [record.levelname for record in caplog.records if "journal" in record.name][:2] == ["ERROR", "WARNING"]
    with served_with(tiny_llama, path) as live:
        for whole in wholes:
            stream_id = json.loads(whole[0][1])["id"]
            found = live.client.get(f"/v1/streams/{stream_id}")
            assert found.status_code in (200, 404)
            if found.status_code == 200:
                assert told(parsed(found.content)) == told(wholes[-1])
        assert told(resume(live, last, None)) == told(wholes[-1])


def limit_pages(live: Live, number: int) -> None:
    """How large the journal may become: at its limit SQLite says what it says of a full disk."""
    live.app.state.server.journal._database.execute(f"PRAGMA max_page_count = {number}")


def received(sock: socket.socket) -> bytes:
    """The events of a stream sent in chunks, up to its end."""
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        raw += sock.recv(1 << 16)
    sock.close()
    pieces = raw.partition(b"\r\n\r\n")[2].split(b"\r\n")
    return b"".join(pieces[1::2])


def test_only_its_owner_can_read_it(tmp_path):
    Journal(tmp_path / "journal", {"model": "a"}).close()
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
