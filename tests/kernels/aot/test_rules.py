"""Rules that the kernels' source keeps, because breaking them shows on a GPU only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[3] / "kernels").glob("*.py"))


def calls_of(path: Path, owner: str, name: str) -> list[str]:
    """The functions of a file that call owner.name."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                if is_attribute and node.value.id == owner and node.attr == name:
                    found.append(function.name)
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_products_go_through_the_helper_that_can_cast_up(path):
    assert set(calls_of(path, "tl", "dot")) <= {"dot"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_nothing_tunes_or_asks_for_block_pointers_at_run_time(path):
    """Autotuning synchronises, which ends a graph capture; block pointers are gone from Triton."""
    for name in ("autotune", "make_block_ptr"):
        assert calls_of(path, "triton", name) + calls_of(path, "tl", name) == []


def test_the_folder_is_no_package():
    """`kernels` is somebody else's distribution, which transformers looks for; a folder without __init__ loses to it."""
    assert not (KERNELS[0].parent / "__init__.py").exists()


def test_the_oracle_is_not_on_the_serving_path():
    engine = KERNELS[0].parents[1] / "engine"
    assert [path for path in engine.rglob("*.py") if "kernels import reference" in path.read_text()] == []
