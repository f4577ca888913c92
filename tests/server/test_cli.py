"""The command line: sizes, environment, and one clear line with exit code 2 for what can't be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.text import Text

from pagestream.engine import StartError
from pagestream.engine.model_choice import ModelChoice
from pagestream.server import command_line as command
from pagestream.server.args import ENGINE_OPTIONS, count, gib, warn_of_unknown_variables
from pagestream.server.serving import bind, listen
from tests.server.terminal import complaint, run, run_here


def test_version():
    assert run("--version").stdout == f"pagestream {version('pagestream')}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bogus"], "--bogus"),
        (["--port", "x"], "--port"),
        (["--max-model-len", "12q"], "--max-model-len"),
        (["--swap-space", "much"], "--swap-space"),
        (["--swap-space", "-1"], "swap_space must be between 0 and 4096 GiB"),
        (["--swap-space", "9T"], "swap_space must be between 0 and 4096 GiB"),
        (["--stream-memory", "-1M"], "--stream-memory"),
        (["--log-level", "loud"], "--log-level"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--drain-timeout", "inf"], "--drain-timeout"),
        (["--stall-timeout", "nan"], "--stall-timeout"),
        (["--max-body-size", "nan"], "--max-body-size"),
        (["--api-key-file", "/"], "--api-key-file / can't be read: Is a directory"),
        (["--quantization", "int3"], "quantization must be one of auto, none, int8, int4"),
        (["--port", "70000"], "70000"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--host", ""], "--host must not be empty"),
        (["--cpu-threads", "100000"], "cpu_threads must be from 1 to 1024"),
        (["--max-requests-per-key", "0"], "--max-requests-per-key must be at least 1"),
        (["--max-tokens-per-minute-per-key", "0"], "--max-tokens-per-minute-per-key must be at least 1"),
        (["--allowed-origins", "https://chat.example/"], "--allowed-origins"),
        (["--allowed-origins", "chat.example"], "--allowed-origins"),
    ],
)
def test_an_option_that_cant_be_is_one_line_and_exit_code_2(arguments, named):
    assert named in complaint("serve", *arguments, PAGESTREAM_PORT="0")  # whoever listens at the default one


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["serve", "--concurrency", "0"], "--concurrency"),
        (["serve", "--num-requests", "0"], "--num-requests"),
        (["serve", "--rate", "nan"], "--rate"),
        (["serve", "--rate", "inf"], "--rate"),
    ],
)
def test_what_cant_be_measured_is_one_line_and_exit_code_2(arguments, named):
    assert named in complaint("bench", *arguments)


def test_a_load_that_the_model_has_no_room_for_is_one_line_and_exit_code_2(tiny_llama: Path):
    done = run("bench", "throughput", "--model", str(tiny_llama), "--workload", "long", "--num-prompts", "1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pagestream: error: prompt has ")
    assert "Traceback" not in done.stderr


def test_the_environment_is_read_like_flags():
    assert "loud" in complaint("serve", PAGESTREAM_LOG_LEVEL="loud")
    assert "12q" in complaint("serve", PAGESTREAM_MAX_NUM_SEQS="12q")


def test_a_variable_that_is_no_options_is_told(caplog):
    set_ones = ["PAGESTREAM_MAX_NUM_SEQ", "PAGESTREAM_MAX_NUM_SEQS", "PAGESTREAM_CACHE", "PAGESTREAM_PORT_8000_TCP", "PATH"]
    warn_of_unknown_variables(set_ones, command.serve.__annotations__)
    (told,) = caplog.messages
    assert told == "PAGESTREAM_MAX_NUM_SEQ is set, and no option has this variable; did you mean PAGESTREAM_MAX_NUM_SEQS?"


@pytest.mark.parametrize("option", ["--chat-template", "--journal"])
def test_a_file_that_is_not_there_is_told_before_weights_are_loaded(tiny_llama: Path, tmp_path: Path, monkeypatch, option: str):
    monkeypatch.setattr(ModelChoice, "load", None)
    told = complaint("serve", str(tiny_llama), option, str(tmp_path / "none/file"), PAGESTREAM_PORT="0")
    assert str(tmp_path / "none") in told


def test_a_port_in_use_is_found_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = run("serve", "--port", str(taken.getsockname()[1]))
    assert told.returncode == 2
    assert told.stderr.endswith("Address already in use; --port takes another\n")


def test_of_two_on_one_port_who_listens_first_has_it():
    """Both may be bound while neither listens, as two are that start at once and load their models."""
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(StartError, match="can't listen on 127.0.0.1:.* Address already in use; --port takes another"):
            listen(second)


def test_an_address_answers_as_soon_as_it_is_told_and_ctrl_c_ends_with_0(tiny_llama: Path):
    command_line = [sys.executable, "-m", "pagestream.server", "serve", str(tiny_llama), "--port", "0", "--num-kv-blocks", "100"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" at ")[2].strip().removesuffix("/v1")
            assert httpx.get(f"{url}/livez", timeout=60).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_closed_standard_output_is_no_error():
    command_line = ["sh", "-c", 'exec "$0" -m pagestream.server --version >&-', sys.executable]
    done = subprocess.run(command_line, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_openapi_is_written_to_a_file(tmp_path: Path):
    assert run_here("openapi", "--output", str(tmp_path / "api.yaml")).returncode == 0
    assert (tmp_path / "api.yaml").read_text(encoding="utf-8") == run_here("openapi").stdout


# Ctrl-C as soon as something looks for this module.
INTERRUPTED_AT = """
import os, signal, sys
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from pagestream.server.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["fastapi", "pagestream.server.command_line", "torch", "pagestream.engine.factory"])
def test_a_start_that_is_interrupted_leaves_one_line(tiny_llama: Path, module: str):
    arguments = [module, "serve", str(tiny_llama), "--port", "0"]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_AT, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pagestream: interrupted\n")


@pytest.mark.parametrize(("pid", "code"), [(1, 143), (2, -signal.SIGTERM)])
def test_the_first_process_of_a_container_can_be_stopped_while_it_loads(tiny_llama: Path, pid: int, code: int):
    """Only there a signal without a handler has no effect; everywhere else the default is kept."""
    program = f"import os; own = os.getpid(); os.getpid = lambda: {pid}\n" + INTERRUPTED_AT.replace("os.getpid(), signal.SIGINT", "own, signal.SIGTERM")
    arguments = ["pagestream.engine.factory", "serve", str(tiny_llama), "--port", "0"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code


def test_who_does_not_read_on_gets_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "pagestream.server", "openapi"], stdout=nobody, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [("openapi",), ("openapi", "--output", "/dev/full"), ("--help",)], ids=" ".join)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "pagestream.server", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "pagestream: error: No space left on device\n")


def test_a_file_that_cant_be_written_is_named(tmp_path: Path):
    assert complaint("openapi", "--output", str(tmp_path)) == f"pagestream: error: {tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("text", "value"), [("32", 32), ("32k", 32_000), ("32K", 32_768), ("1.5K", 1536), ("1m", 1_000_000), (8192, 8192)]
)
def test_counts(text, value):
    assert count(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2.0), ("1.5", 1.5), ("512M", 0.5), ("2GiB", 2.0), ("2 gb", 2.0), ("1t", 1024.0), (0.5, 0.5)]
)
def test_sizes(text, value):
    assert gib(text) == value


@pytest.mark.parametrize("text", ["", "k", "-", "--1", "1e3", "nan", "12q", "١"])
def test_what_is_no_size(text):
    for parse in (count, gib):
        with pytest.raises(typer.BadParameter):
            parse(text)


def test_a_count_has_no_sign():
    with pytest.raises(typer.BadParameter):
        count("-1")


def helps(group: Any) -> Iterator[str]:
    for each in group.commands.values():
        yield from helps(each) if hasattr(each, "commands") else (param.help or "" for param in each.params)


def test_no_bracket_of_a_help_is_read_as_a_colour():
    texts = list(helps(typer.main.get_command(command.cli)))
    assert len(texts) > 100
    for text in texts:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text


def test_every_engine_option_has_a_flag():
    flags = set(command.serve.__annotations__)
    assert flags >= ENGINE_OPTIONS, ENGINE_OPTIONS - flags
