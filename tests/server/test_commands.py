"""The commands that talk to a running server, and those that describe this machine."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagestream.engine import StartError
from pagestream.server import command_line as command
from pagestream.server.commands.engine_state import EngineState
from pagestream.server.commands.top import Rates, grid, heading, picture
from pagestream.server.live import encode_event
from pagestream.server.logs import JsonFormatter, start_logging
from tests.server.conftest import Live
from tests.server.terminal import invoke

# ---- chat and complete ------------------------------------------------------------------------------------------------


def test_complete_prints_what_the_server_answers(live: Live):
    whole = live.complete(prompt="Once", max_tokens=12, seed=3).json()["choices"][0]["text"]
    told = invoke("complete", "Once", "--url", live.url, "--max-tokens", "12", "--seed", "3")
    assert (told.exit_code, told.stdout) == (0, whole + "\n")
    assert invoke("complete", "-", "--url", live.url + "/v1", "--max-tokens", "12", "--seed", "3", stdin="Once").stdout == whole + "\n"


def test_chat_remembers_what_was_said_until_it_is_told_to_forget(live: Live):
    def answer(*messages: str) -> str:
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
        body = {"messages": [{"role": "system", "content": "Be brief."}, *turns], "max_tokens": 8, "seed": 1}
        return live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]

    first = answer("Hello")
    second = answer("Hello", first, "And now?")
    options = ("--url", live.url, "--system", "Be brief.", "--max-tokens", "8", "--seed", "1")
    told = invoke("chat", *options, stdin="Hello\nAnd now?\n/clear\nHello\n/quit\nnever sent\n")
    assert told.exit_code == 0
    assert told.stdout == "".join(f"{text}\n" for text in (first, second, first))


@pytest.mark.parametrize("arguments", [("complete", "x"), ("chat",), ("top", "--once")])
def test_a_server_that_is_not_there_is_one_clear_line(arguments):
    told = invoke(*arguments, "--url", "http://127.0.0.1:9")
    assert isinstance(told.exception, StartError)
    assert "can't be reached" in str(told.exception)


def test_the_key_goes_along_and_a_wrong_one_is_told(start):
    keyed = start(api_keys=("secret",))
    assert invoke("complete", "Once", "--url", keyed.url, "--api-key", "secret").exit_code == 0
    assert "valid key" in str(invoke("complete", "Once", "--url", keyed.url, "--api-key", "wrong").exception)


# ---- top --------------------------------------------------------------------------------------------------------------


def test_top_shows_blocks_and_queues():
    totals = dict.fromkeys(("num_steps", "num_sampled_tokens", "num_scheduled_tokens", "num_preempted", "num_copied_blocks"), 0)
    engine = {**totals, "now_s": 10.0, "num_blocks": 6, "num_free": 3, "num_swap_blocks": 2, "num_swap_free": 1}
    engine |= {"schedule_s": 0.0, "forward_s": 0.0, "sample_s": 0.0, "detokenize_s": 0.0}
    request = {
        "status": "running", "arrival_s": 7.5, "num_prompt_tokens": 1234, "num_output_tokens": 5, "num_preempted_swap": 2,
        "num_preempted_recompute": 0, "request_id": "cmpl-x", "tables": [[0, 1]],
    }  # fmt: skip
    whole = {
        "engine": engine, "blocks": {"0": [1, 1, 0], "1": [1, 2, 1], "2": [None, 0, 1]}, "swap": {"1": [2, 1, 0]},
        "requests": {"1": request, "2": {**request, "status": "swapped", "tables": [[1]]}},
    }  # fmt: skip
    state, rates = EngineState(), Rates()
    state.apply({"kind": "full", **whole})
    rates.take(state.engine)
    later = {"now_s": 12.0, "num_steps": 4, "num_sampled_tokens": 100, "num_scheduled_tokens": 300, "forward_s": 0.15, "sample_s": 0.05}
    change = {"engine": later, "blocks": {"2": None, "3": [1, 1, 0]}, "requests": {"1": {"tables": [[1, [4, 5]]]}, "2": None}}
    state.apply(json.loads(encode_event("delta", change)[6:]))
    rates.take(state.engine)
    assert state.requests.keys() == {1}
    assert state.requests[1]["tables"] == [[0, 4, 5]]
    assert (rates.tokens_per_s, rates.prompt_tokens_per_s, rates.step_s) == (50, 100, 0.05)
    text = io.StringIO()
    Console(file=text, width=110).print(picture(state, rates))
    small = io.StringIO()
    Console(file=small, width=40).print(grid(state.blocks, 10_000, 150))
    assert 100 < small.getvalue().count("·") <= 150
    shown = text.getvalue()
    assert "█▓·█··" in shown
    assert "3 of 6 free" in shown
    assert "1,234" in shown
    assert "4.5 s" in shown
    assert "50 tokens/s" in shown
    assert max(len(line) for line in heading(state, Rates()).plain.splitlines()) <= 76, "wraps on a terminal of 80 columns"


# ---- env, --config, logs ----------------------------------------------------------------------------------------------


def test_env_describes_the_machine_and_tells_no_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGESTREAM_API_KEY", "secret-value")
    told = invoke("env", "--json")
    found = json.loads(told.stdout)
    assert found["packages"]["pagestream"]
    assert found["variables"]["PAGESTREAM_API_KEY"] == "set"
    assert "secret-value" not in told.stdout
    assert "secret-value" not in invoke("env").stdout


def served_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The options that `serve` would have used."""

    class Enough(Exception):
        pass

    kept: dict[str, Any] = {}

    def keep(options: dict[str, Any]) -> None:
        kept.update(options)
        raise Enough

    monkeypatch.setattr(command, "start_logging", lambda *arguments: None)
    monkeypatch.setattr(command, "to_engine_args", keep)
    told = invoke("serve", *arguments)
    if not isinstance(told.exception, Enough):
        raise told.exception
    return kept


def test_a_file_gives_options_and_the_command_line_and_the_environment_go_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from-file\nmax-num-seqs: 8\nport: 1234\nenable_prefix_caching: false\nkv_cache_memory: 512M\n"
        "served-model-name: [a, b]\nblock-size: 32\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PAGESTREAM_BLOCK_SIZE", "64")
    options = served_with(monkeypatch, "--config", str(path), "--port", "99")
    assert options["model"] == "from-file"
    assert (options["max_num_seqs"], options["port"], options["block_size"]) == (8, 99, 64)
    assert options["enable_prefix_caching"] is False
    assert options["kv_cache_memory"] == 0.5
    assert list(options["served_model_name"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "why"), [("max-num-sqs: 8", "is no option"), ("- a", "must be a mapping"), ("a: [", "is no YAML"), (None, "can't be read")]
)
def test_a_file_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, why: str):
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(StartError, match=why):
        served_with(monkeypatch, "--config", str(path))


def test_a_json_line_has_the_edge_of_a_request_in_fields():
    record = logging.makeLogRecord({"name": "a.b", "levelno": 20, "levelname": "INFO", "msg": "%s ended", "args": ("x",), "request_id": "r\n1"})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told["time"].endswith("Z")
    assert {name: told[name] for name in told if name != "time"} == {
        "level": "info", "logger": "a.b", "message": "x ended", "request_id": "r\n1",
    }  # fmt: skip


def test_every_request_logs_one_line_with_its_id(live: Live, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "pagestream.server.middleware"):
        live.client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 2}, headers={"X-Request-Id": "mine"})
        live.client.get("/health")
        live.until(lambda: bool(caplog.records), "the line")
    (record,) = caplog.records
    assert (record.request_id, record.status, record.path) == ("mine", 200, "/v1/completions")


def test_a_log_format_that_does_not_exist_is_refused():
    with pytest.raises(StartError, match="plain or json"):
        start_logging("info", "xml")
