"""The plan of the rooms: who may import whom."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kernels": set(), "engine": {"kernels"}, "server": {"engine"}}
# Rooms of the engine; files that stand in no room are the hall, which may use all rooms.
ROOMS = {
    "core": set(),
    "text": {"core"},
    "attention": {"core", "kernels"},
    "models": {"core", "attention", "kernels"},
    "sampling": {"core", "attention", "kernels"},
    "runner": {"core", "attention", "models", "sampling", "kernels"},
    "features": {"core", "attention", "models", "sampling", "kernels"},
}
WEB = {"fastapi", "starlette", "uvicorn", "sse_starlette", "prometheus_client", "typer", "pydantic"}
# Features must not leak into the heart.
WORDS_OUT_OF_CORE = ("lora", "multimodal", "grammar", "dequant")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} has no source"
    return found


def imports_of(path: Path) -> list[str]:
    return list(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_downwards(folder):
    for path in sources(folder):
        for module in imports_of(path):
            head, _, rest = module.partition(".")
            assert head not in FOLDERS, f"{path}: write pagestream.{module}"
            if head == "pagestream":
                assert rest.partition(".")[0] in FOLDERS[folder] | {folder}, f"{path} imports {module}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_engine_import_only_downwards(room):
    for path in sources(f"engine/{room}"):
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] != "pagestream":
                continue
            target = parts[1] if parts[1] != "engine" else parts[2] if len(parts) > 2 else "hall"
            assert target in ROOMS[room] | {room}, f"{path} imports {module}"


def test_no_feature_imports_another():
    for path in sources("engine/features"):
        own = path.relative_to(ROOT / "engine" / "features").parts[0]
        for module in imports_of(path):
            if module.startswith("pagestream.engine.features."):
                assert module.split(".")[3] == own, f"{path} imports {module}"


def test_core_imports_the_standard_library_only():
    for path in sources("engine/core"):
        for module in imports_of(path):
            head = module.partition(".")[0]
            assert head in sys.stdlib_module_names or module.startswith("pagestream.engine.core"), f"{path} imports {module}"


def test_core_is_free_of_clocks_threads_and_logging():
    for path in sources("engine/core"):
        for module in imports_of(path):
            assert module.partition(".")[0] not in {"time", "asyncio", "threading", "logging", "random"}, f"{path} imports {module}"


def test_only_the_server_imports_the_web_stack():
    for folder in ("engine", "kernels"):
        for path in sources(folder):
            for module in imports_of(path):
                assert module.partition(".")[0] not in WEB, f"{path} imports {module}"


def test_the_server_uses_the_engines_public_names_only():
    for path in sources("server"):
        for module in imports_of(path):
            assert not module.startswith("pagestream.engine."), f"{path} imports {module}: import it from pagestream.engine"


def test_kernels_import_tensors_and_triton_only():
    """And numpy, for tables on the host."""
    for path in sources("kernels"):
        for module in imports_of(path):
            head = module.partition(".")[0]
            assert head in sys.stdlib_module_names | {"torch", "triton", "numpy", "pagestream"}, f"{path} imports {module}"


@pytest.mark.parametrize("path", ["engine/core/scheduler.py", "engine/async_llm_engine.py", "engine/llm_engine.py", "server/sse.py"])
def test_the_way_of_every_token_knows_no_feature(path):
    assert not [module for module in imports_of(ROOT / path) if module.startswith("pagestream.engine.features")]


def test_core_knows_no_feature_by_name():
    for path in sources("engine/core"):
        text = path.read_text(encoding="utf-8").lower()
        for word in WORDS_OUT_OF_CORE:
            assert word not in text, f"{path} holds the word {word}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_stay_readable(folder):
    for path in sources(folder):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= 500, f"{path} has {num_lines} lines"
