"""Any damage to a checkpoint's file: it is read or refused in one line, and nothing large is made because the file says so."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.gguf_file import GgufFile
from pagestream.engine.models.tensor_source import SafetensorsSource
from tests.engine.models.test_gguf_file import small_file

FUZZED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
MOST_BYTES = 4 << 20

# (where, bytes to take out, bytes to put in), several of them
damages = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 12), st.binary(max_size=12) | st.sampled_from([b"\xff" * 8, b"\x00" * 8])),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for at, num_out, new in changes:
        at %= len(content)
        content = content[:at] + new + content[at + num_out :]
    return content or b"\x00"


def survive(read: Callable[[], None]) -> None:
    refusal = ""
    tracemalloc.start()
    try:
        read()
    except StartError as error:
        refusal = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert "\n" not in refusal


def test_gguf(tmp_path: Path):
    content = small_file(tmp_path / "sound.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"

    def read() -> None:
        file = GgufFile(path)
        for key in list(file.values):
            file.get(key)
        for name in list(file.tensors):
            file.load(name)

    @FUZZED
    @given(damages)
    def run(changes: list[tuple[int, int, bytes]]) -> None:
        path.write_bytes(damaged(content, changes))
        survive(read)

    run()


def test_safetensors(tmp_path: Path):
    save_file({"w": torch.ones(4, 8), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    folder = tmp_path / "damaged"
    folder.mkdir()

    def read() -> None:
        source = SafetensorsSource(folder)
        try:
            for name, shape in (("w", (4, 8)), ("b", (3,))):
                if source.has(name):
                    source.load(name, shape)
        finally:
            source.opened.close()

    @FUZZED
    @given(damages)
    def run(changes: list[tuple[int, int, bytes]]) -> None:
        (folder / "model.safetensors").write_bytes(damaged(content, changes))
        survive(read)

    run()
