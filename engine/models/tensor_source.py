"""Where weights come from, under the names that Hugging Face checkpoints use: safetensors, a GGUF file, or a random generator."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.decoder_config import weight_layout
from pagestream.engine.models.gguf_file import GgufFile
from pagestream.kernels.cpu.ops import GGUF_KINDS, GgufBlocks

INDEX_NAME = "model.safetensors.index.json"
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class TensorSource(Protocol):
    def has(self, name: str) -> bool: ...

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """On the CPU, in a float type; may be a view of the file, so not to be written to.

        Raises StartError, before anything is read, where there is no such tensor or it has another shape.
        """


class SafetensorsSource:
    """The tensors of a folder's safetensors files, mapped, so that only what is asked for is read.

    The safetensors library compares every offset of a header with the file's size before it makes anything of that size.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.opened = ExitStack()
        self.file_of: dict[str, Any] = {}
        for file in safetensors_files(folder):
            handle = self.open(file)
            self.file_of.update(dict.fromkeys(handle.keys(), handle))

    def open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self.opened.enter_context(safe_open(str(file), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise StartError(f"{file} is not a usable safetensors file: {error}") from error

    def has(self, name: str) -> bool:
        return name in self.file_of

    def dtype(self, name: str) -> torch.dtype:
        """As stored; raises StartError for the integers of a quantised checkpoint."""
        stored = self.file_of[name].get_slice(name).get_dtype()
        if stored not in FLOATS:
            raise StartError(f"{self.folder} holds {name} as {stored}: quantised checkpoints are not supported")
        return FLOATS[stored]

    def check_weights(self) -> None:
        """Raises StartError for a weight that is no float: whoever else reads the files might take its codes for numbers."""
        for name in self.file_of:
            if name.endswith("weight"):  # integers under other names are masks and positions
                self.dtype(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.file_of:
            raise StartError(f"the checkpoint in {self.folder} has no tensor {name}")
        self.dtype(name)
        expect_shape(name, tuple(self.file_of[name].get_slice(name).get_shape()), shape, self.folder)
        return self.file_of[name].get_tensor(name)


def expect_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...], where: Path) -> None:
    if stored != expected:
        raise StartError(f"tensor {name} is {list(stored)} in {where}, and its config asks for {list(expected)}")


def safetensors_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint; raises StartError where one of them is missing."""
    single = folder / "model.safetensors"
    index = folder / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
        if not found:
            raise StartError(f"model folder {folder} has no .safetensors files")
        return found
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise StartError(f"{index} names {name!r}, which is not a file of that folder")
    return [folder / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; raises StartError if it is anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"can't read {path}: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} holds no JSON object")
    return content


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # Phi-3's file holds both under this name and no ffn_gate
    "mlp.down_proj": "ffn_down",
}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, _, kind = name.rpartition(".")
    layer = LAYER_NAME.fullmatch(stem)
    if layer:
        return f"blk.{layer[1]}.{GGUF_NAMES[layer[2]]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


class GgufSource:
    """The tensors of a GGUF file.

    Files of the architecture "llama" store the rows of Q and K for a rotary embedding that turns neighbouring dimensions;
    they are put back into the half-split order.  `rows` says how, for those who serve the stored blocks themselves.
    """

    def __init__(self, file: GgufFile, config: Mapping[str, Any]):
        self.file = file
        self.heads: dict[str, int] = {}  # of the tensors whose rows are interleaved
        if file.get("general.architecture") == "llama":
            self.heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def has(self, name: str) -> bool:
        stored = gguf_name(name)
        if name.endswith("mlp.gate_up_proj.weight"):
            return stored in self.file.tensors and stored.replace("ffn_up", "ffn_gate") not in self.file.tensors
        return stored in self.file.tensors

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self.has(name):
            raise StartError(f"{self.file.path} has no tensor {gguf_name(name)}")
        expect_shape(name, self.file.tensors[gguf_name(name)].shape, shape, self.file.path)
        tensor = self.file.load(gguf_name(name))
        rows = self.rows(name)
        return tensor if rows is None else tensor[rows]

    def blocks(self, name: str, shape: tuple[int, ...]) -> GgufBlocks | None:
        """The tensor as stored, its rows in order; None where no operator takes it so.  Raises StartError for another shape."""
        stored = self.file.tensors.get(gguf_name(name))
        if stored is None or stored.type.name not in GGUF_KINDS:
            return None
        expect_shape(name, stored.shape, shape, self.file.path)
        raw = self.file.raw(stored.name)
        rows = self.rows(name)
        # By numpy: torch shares such a copy out among threads, which costs ten times the copy where they must wait for a core.
        return GgufBlocks(raw.type.name, raw.data if rows is None else torch.from_numpy(raw.data.numpy()[rows.numpy()]))

    def rows(self, name: str) -> Tensor | None:
        """Which stored row is row i of the tensor; None where they are in order."""
        stored = gguf_name(name)
        num_heads = self.heads.get(stored.split(".")[-2])
        if num_heads is None:
            return None
        num_rows = self.file.tensors[stored].shape[0]
        if num_rows % (2 * num_heads):
            raise StartError(f"{self.file.path} has {num_rows} rows in {stored}, which do not fit {num_heads} heads")
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


class DummySource:
    """Random weights of a checkpoint that has only its config: the same for the same seed, on every device."""

    POOL_SIZE = 4_194_301  # prime, so that no row of a matrix repeats another

    def __init__(self, config: Mapping[str, Any], seed: int):
        self.layout = weight_layout(config)
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randn(self.POOL_SIZE, generator=generator) * float(config.get("initializer_range", 0.02))
        self.generator = generator

    def move_to(self, device: torch.device) -> None:
        """Make the tensors there from now on: the same numbers, but nothing of their size has to travel."""
        self.pool = self.pool.to(device)

    def has(self, name: str) -> bool:
        if name == "lm_head.weight":
            return not self.layout.tied_head
        return not name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape)
        size = math.prod(shape)
        start = int(torch.randint(self.POOL_SIZE, (), generator=self.generator))
        copies = -(-(start + size) // self.POOL_SIZE)
        return self.pool.repeat(copies)[start : start + size].view(shape)
