"""The `pagestream` command, as a process of its own or, where that adds nothing but its start, in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from pagestream.server import __main__ as command
from pagestream.server import command_line


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagestream.server", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same for a command that ends by itself and leaves nothing behind."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        patch.object(sys, "argv", ["pagestream", *arguments]),
        patch.dict(os.environ, environment),
    ):
        try:
            command.main()
        except SystemExit as end:
            return subprocess.CompletedProcess(arguments, int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command did not end with a code")


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    """As typer's own runner has it: with standard input, and with what the command raised."""
    return CliRunner().invoke(command_line.cli, list(arguments), input=stdin)


def complaint(*arguments: str, **environment: str) -> str:
    """The one line of a refusal."""
    done = run_here(*arguments, **environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("pagestream: error: ")
    return line
