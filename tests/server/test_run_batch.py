"""`pagestream run-batch`: every answer is written once, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs, StartError
from pagestream.server.commands.batch_file import Answers, count_requests
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, served
from tests.server.terminal import invoke


def write_batch(path: Path, num_lines: int, **body: Any) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for number in range(num_lines):
            entry = {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"P{number}", "seed": 1, **body}}
            lines.write(json.dumps(entry) + "\n")


def answers_of(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    twice = [each for each, count in Counter(entry["custom_id"] for entry in entries).items() if count > 1]
    assert not twice
    return {entry["custom_id"]: entry for entry in entries}


@pytest.fixture
def small(tiny_llama: Path) -> Iterator[Live]:
    """A real engine."""
    metrics = Metrics("m")
    args = EngineArgs(model=str(tiny_llama), num_kv_blocks=400, max_num_seqs=32, device="cpu", cpu_threads=1)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as live:
        yield live


def test_a_batch_that_was_killed_goes_on_and_writes_each_answer_once(small: Live, tmp_path: Path):
    live = small
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(requests, 300, max_tokens=20, ignore_eos=True)
    arguments = ["run-batch", "-i", str(requests), "-o", str(output), "--url", live.url, "--concurrency", "32"]
    killed = subprocess.Popen([sys.executable, "-m", "pagestream.server", *arguments], env=os.environ, stderr=subprocess.DEVNULL)
    live.until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 120, "some answers", 60)
    killed.kill()
    killed.wait()
    with output.open("ab") as half:
        half.write(b'{"custom_id": "r-299", "resp')  # as if it had been killed in the middle of a line
    num_before = output.read_bytes().count(b"\n")
    assert num_before < 300, "it must be killed while there is work left"
    told = invoke(*arguments)
    assert told.exit_code == 0, told.output
    found = answers_of(output)
    assert len(found) == 300
    assert all(entry["response"]["status_code"] == 200 and entry["error"] is None for entry in found.values())
    for number in (0, 150, 299):
        alone = live.complete(prompt=f"P{number}", seed=1, max_tokens=20, ignore_eos=True).json()
        assert found[f"r-{number}"]["response"]["body"]["choices"] == alone["choices"]
    num_computed = live.metric('vllm:request_success_total{engine="0",finished_reason="length"')
    assert num_computed <= 300 + 32 + 3, "what was answered is not asked for again"


def test_answers_that_cant_be_written_name_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class FullDisk:
        def write(self, line: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Answers(tmp_path / "out.jsonl") as answers:
        answers.add("a", {"response": {}})
        with monkeypatch.context() as patched:
            patched.setattr(answers, "_file", FullDisk())
            with pytest.raises(StartError, match="out.jsonl can't be written: No space left"):
                answers.add("b", {"response": {}})
        assert (answers.has("a"), answers.has("b")) == (True, False)
    assert len(answers_of(tmp_path / "out.jsonl")) == 1


def test_a_full_queue_is_waited_for_and_a_refusal_is_an_answer(start, tmp_path: Path):
    live = start({"step_s": 0.001, "max_num_seqs": 2, "max_num_queued": 0})
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(requests, 12, max_tokens=3)
    with requests.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": "P", "temperature": 9}}) + "\n")
    told = invoke("run-batch", "-i", str(requests), "-o", str(output), "--url", live.url, "--concurrency", "4")
    assert told.exit_code == 1
    assert "1 request was refused" in told.output
    found = answers_of(output)
    assert len(found) == 13
    bad = found.pop("bad")
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert all(entry["response"]["status_code"] == 200 for entry in found.values())


def test_a_batch_holds_requests_of_every_route_that_answers_at_once(start, tmp_path: Path):
    live: Live = start()
    turns = [{"role": "user", "content": "Hello"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
        "/v1/chat/completions": {"messages": turns, "max_tokens": 3},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
        "/v1/embeddings": {"input": "Hello"},
        "/v1/messages": {"messages": turns, "max_tokens": 3},
    }
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}) for url, body in asked.items()]
    requests.write_text("\n".join(lines), encoding="utf-8")
    told = invoke("run-batch", "-i", str(requests), "-o", str(output), "--url", live.url)
    assert told.exit_code == 0, told.output
    found = answers_of(output)
    kinds = {url: body["object" if "object" in body else "type"] for url in asked if (body := found[url]["response"]["body"])}
    assert list(kinds.values()) == ["text_completion", "chat.completion", "response", "list", "message"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ('{"custom_id": 1, "url": "/v1/completions", "body": {}}', "needs custom_id"),
        ('{"custom_id": "a", "url": "/v1/nothing", "body": {}}', "url one of"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "streamed"),
        ('{"custom_id": "b", "url": "/v1/completions", "body": {}}', "twice"),
    ],
)
def test_a_bad_line_is_found_before_anything_is_sent(tmp_path: Path, line: str, why: str):
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "b", "url": "/v1/completions", "body": {}}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(StartError, match=why):
        count_requests(path)


def test_an_output_has_one_writer_and_foreign_files_are_left_alone(tmp_path: Path):
    with Answers(tmp_path / "out.jsonl") as answers:
        answers.add("a", {"response": {}})
        with pytest.raises(StartError, match="another run"):
            Answers(tmp_path / "out.jsonl")
    with Answers(tmp_path / "out.jsonl") as again:
        assert again.has("a")
        assert not again.has("b")
    (tmp_path / "poem.txt").write_text("no answer\n", encoding="utf-8")
    with pytest.raises(StartError, match="no answer of a batch"):
        Answers(tmp_path / "poem.txt")
    assert (tmp_path / "poem.txt").read_text(encoding="utf-8") == "no answer\n"
