"""The documents say what there is: every flag, every parameter, every metric, and nothing that there isn't."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from pagestream.server import command_line as command
from pagestream.server.conversation import ChatRequest
from pagestream.server.metrics import Metrics
from pagestream.server.parameters import describe
from pagestream.server.protocol import CompletionRequest
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVER = (ROOT / "server/README.md").read_text(encoding="utf-8")


def commands() -> dict[str, Any]:
    """Each command by its name, those within a group too."""
    found: dict[str, Any] = {}
    for name, each in typer.main.get_command(command.cli).commands.items():  # type: ignore[attr-defined]
        found |= {f"{name} {inner}": one for inner, one in each.commands.items()} if hasattr(each, "commands") else {name: each}
    return found


def flags_of(each: Any) -> set[str]:
    return {flag for option in each.params for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")}


def rows(text: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    _, _, table = text.partition(f"| {first_column} |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_readme_has_every_flag_of_serve_in_its_table_and_no_other():
    listed = {flag for row in rows(README, "flag") for flag in re.findall(r"`(--[a-z-]+)", row[0])}
    assert listed == flags_of(commands()["serve"])


@pytest.mark.parametrize(
    ("flag", "default"),
    [("--block-size", "16"), ("--drain-timeout", "30 s"), ("--stall-timeout", "60 s"), ("--slow-reader-timeout", "120 s"), ("--slow-sender-timeout", "60 s"),
     ("--max-body-size", "8 MiB")],
)
def test_a_default_in_the_table_is_the_commands_own(flag: str, default: str):
    (row,) = [row for row in rows(README, "flag") if f"`{flag}`" in row[0]]
    assert default in row[1]
    (option,) = [option for option in commands()["serve"].params if flag in option.opts]
    assert float(option.default) == float(default.split()[0])


def test_the_readme_has_every_command():
    told = set(re.findall(r"`pagestream ([a-z-]+)", README))
    assert {name.split()[0] for name in commands()} <= told
    for group, each in re.findall(r"`pagestream (bench) ([a-z]+)", README):
        assert f"{group} {each}" in commands()


def test_every_flag_that_the_readme_names_belongs_to_some_command():
    own = set().union(*(flags_of(each) for each in commands().values())) | {"--install-completion", "--help"}
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert set(re.findall(r"`(?:pagestream [a-z -]*)?(--[a-z-]+)", text)) <= own


@pytest.mark.parametrize(("kind", "wire"), [("completions", CompletionRequest), ("chat", ChatRequest)])
def test_the_parameters_table_has_every_field_with_its_range(kind: str, wire: Any):
    table = {row[0].strip("`"): row[1:] for row in rows(SERVER, "field")}
    fields = describe(wire)["fields"]
    assert {name for name, row in table.items() if row[0] in (kind, "both")} == fields.keys()
    for name, described in fields.items():
        for shape in described.get("anyOf", [described]):
            limits = [shape[key] for key in ("minimum", "exclusiveMinimum", "maximum") if key in shape]
            shown = [float(number) for number in re.findall(r"-?\d+", table[name][1])]
            assert shown == [limit for limit in limits if abs(limit) < 1e6] or not limits, name


def test_the_metrics_table_has_every_metric_and_its_labels():
    metrics = Metrics("m")
    metrics.watch(FakeEngine())  # type: ignore[arg-type]  # only its facts are read
    table = {row[0].strip("`"): row for row in rows(SERVER, "metric")}
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        if not family.name.startswith(("process_", "python_")):
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
            assert table[name][1] == family.type
            named = set(re.findall(r"`(\w+)`", table[name][2]))
            assert named <= found[name] or not found[name], name
    assert found.keys() == table.keys()


def test_what_the_documents_link_to_is_there():
    for path in (ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_shell_completes_the_flags():
    program = Path(sys.executable).parent / "pagestream"
    environment = {**os.environ, "_PAGESTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "pagestream serve --max-num", "COMP_CWORD": "2"}
    told = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert set(told) == {flag for flag in flags_of(commands()["serve"]) if flag.startswith("--max-num")}
