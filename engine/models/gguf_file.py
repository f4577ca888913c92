"""A small reader of GGUF files: metadata, and tensors as views of the mapped file.

    magic "GGUF" | version u32 | tensors u64 | keys u64 | key-value pairs | tensor table | padding | tensor data

All integers are little-endian.  Nothing in the file is believed: every length is compared with the bytes that are left before
anything of that size is made.  Arrays are skipped at opening and decoded when asked for, because a vocabulary has 10^5 strings.
Source: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError

GGUF_MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4


class GgmlType(IntEnum):
    """How a tensor's elements are stored; the numbers are the file format's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class BlockLayout:
    num_weights: int
    num_bytes: int


BLOCK_LAYOUTS = {
    GgmlType.F32: BlockLayout(1, 4),
    GgmlType.F16: BlockLayout(1, 2),
    GgmlType.BF16: BlockLayout(1, 2),
    GgmlType.Q4_0: BlockLayout(32, 18),
    GgmlType.Q4_1: BlockLayout(32, 20),
    GgmlType.Q5_0: BlockLayout(32, 22),
    GgmlType.Q5_1: BlockLayout(32, 24),
    GgmlType.Q8_0: BlockLayout(32, 34),
    GgmlType.Q2_K: BlockLayout(256, 84),
    GgmlType.Q3_K: BlockLayout(256, 110),
    GgmlType.Q4_K: BlockLayout(256, 144),
    GgmlType.Q5_K: BlockLayout(256, 176),
    GgmlType.Q6_K: BlockLayout(256, 210),
    GgmlType.IQ2_XXS: BlockLayout(256, 66),
    GgmlType.IQ2_XS: BlockLayout(256, 74),
    GgmlType.IQ3_XXS: BlockLayout(256, 98),
    GgmlType.IQ1_S: BlockLayout(256, 50),
    GgmlType.IQ4_NL: BlockLayout(32, 18),
    GgmlType.IQ3_S: BlockLayout(256, 110),
    GgmlType.IQ2_S: BlockLayout(256, 82),
    GgmlType.IQ4_XS: BlockLayout(256, 136),
    GgmlType.IQ1_M: BlockLayout(256, 56),
    GgmlType.TQ1_0: BlockLayout(256, 54),
    GgmlType.TQ2_0: BlockLayout(256, 66),
    GgmlType.MXFP4: BlockLayout(32, 17),
}

STRING_TYPE, ARRAY_TYPE = 8, 9
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LENGTH = struct.Struct("<Q")
ARRAY_HEAD = struct.Struct("<IQ")  # type of the elements, how many


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table; `shape` is row-major as torch has it, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    start: int  # byte of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A tensor's bytes as they stand in the file: uint8 [rows, bytes of a row], a read-only view of the mapping."""

    data: Tensor
    type: GgmlType


class Corrupt(Exception):
    """The file is not what its own numbers say; becomes a StartError that names the file."""


class GgufFile:
    """An open GGUF file; raises StartError where the file is cut off, malformed, or of a kind that can't be read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise StartError(f"can't read {path}: {error}") from error
        self.values: dict[str, tuple[int, int]] = {}  # key -> value type, where the value starts
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self.read_tables()
        except Corrupt as error:
            raise StartError(f"{path} is not a usable GGUF file: {error}") from error

    def read_tables(self) -> None:
        cursor = Cursor(self.bytes)
        if cursor.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise Corrupt("it does not begin with GGUF")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise Corrupt(f"version {version} is not supported (2 and 3 are)")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_values):  # a false count meets the end of the file before it costs anything
            key = cursor.string()
            value_type = cursor.scalar("I")
            self.values[key] = (value_type, cursor.offset)
            cursor.skip_value(value_type)
        entries = [self.read_tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise Corrupt(f"its alignment is {alignment}")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, shape, tensor_type, offset in entries:
            self.tensors[name] = self.place_tensor(name, shape, tensor_type, data_start + offset)
        if len(self.tensors) != num_tensors:
            raise Corrupt("two tensors have the same name")

    def read_tensor_entry(self, cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise Corrupt(f"tensor {name!r} has {num_dims} dimensions")
        dims = [cursor.scalar("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")

    def place_tensor(self, name: str, shape: tuple[int, ...], type_number: int, start: int) -> GgufTensor:
        """Raises Corrupt unless all of the tensor lies inside the file."""
        try:
            tensor_type = GgmlType(type_number)
        except ValueError:
            raise Corrupt(f"tensor {name!r} is stored as type {type_number}, which is not supported") from None
        layout = BLOCK_LAYOUTS[tensor_type]
        if shape[-1] % layout.num_weights:
            raise Corrupt(f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {layout.num_weights}")
        num_bytes = math.prod(shape) // layout.num_weights * layout.num_bytes
        if num_bytes == 0 or start + num_bytes > len(self.bytes):
            raise Corrupt(f"tensor {name!r} of {num_bytes} bytes does not lie inside the file; it may have been cut off")
        return GgufTensor(name=name, shape=shape, type=tensor_type, start=start, num_bytes=num_bytes)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: a number, a bool, a str or a list of these."""
        if key not in self.values:
            return default
        value_type, start = self.values[key]
        return Cursor(self.bytes, start).value(value_type)

    def raw(self, name: str) -> RawBlocks:
        """A tensor's blocks as stored; rows in the file's order."""
        entry = self.tensors[name]
        flat = np.frombuffer(self.bytes, dtype=np.uint8, count=entry.num_bytes, offset=entry.start)
        num_rows = math.prod(entry.shape[:-1])
        return RawBlocks(data=as_tensor(flat).view(num_rows, -1), type=entry.type)

    def load(self, name: str) -> Tensor:
        """A tensor dequantised: float32, or the stored type where that is a float already; may be a read-only view."""
        entry = self.tensors[name]
        return dequantize(self.raw(name)).view(entry.shape)


class Cursor:
    """Reads forward through the file; every step is checked against the end."""

    def __init__(self, data: mmap.mmap, offset: int = 0):
        self.data = data
        self.offset = offset
        self.size = len(data)

    def take(self, num_bytes: int) -> bytes:
        start = self.advance(num_bytes)
        return self.data[start : start + num_bytes]

    def advance(self, num_bytes: int) -> int:
        """Step over so many bytes; returns where they start."""
        start = self.offset
        if num_bytes > self.size - start:
            raise Corrupt(f"it ends at byte {self.size}, in the middle of its header")
        self.offset = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def array_head(self) -> tuple[int, int]:
        return ARRAY_HEAD.unpack(self.take(ARRAY_HEAD.size))

    def skip_value(self, value_type: int) -> None:
        if value_type == STRING_TYPE:
            self.advance(self.scalar("Q"))
        elif value_type == ARRAY_TYPE:
            element_type, count = self.array_head()
            if element_type == STRING_TYPE:
                self.skip_strings(count)
            else:
                self.advance(count * struct.calcsize("<" + scalar_format(element_type)))
        else:
            self.advance(struct.calcsize("<" + scalar_format(value_type)))

    def skip_strings(self, count: int) -> None:
        """As many calls of string() without the strings; kept tight because a vocabulary and its merges have 10^5 of them."""
        data, offset, last = self.data, self.offset, self.size - LENGTH.size
        for _ in range(count):
            if offset > last:
                break
            offset += LENGTH.size + LENGTH.unpack_from(data, offset)[0]
        else:
            self.advance(offset - self.offset)
            return
        raise Corrupt(f"it ends at byte {self.size}, in the middle of an array")

    def value(self, value_type: int) -> Any:
        if value_type == STRING_TYPE:
            return self.string()
        if value_type != ARRAY_TYPE:
            return self.scalar(scalar_format(value_type))
        element_type, count = self.array_head()
        if element_type == STRING_TYPE:
            return [self.string() for _ in range(count)]
        code = scalar_format(element_type)
        start = self.advance(count * struct.calcsize("<" + code))
        return np.frombuffer(self.data, dtype=np.dtype("<" + code), count=count, offset=start).tolist()


def scalar_format(value_type: int) -> str:
    if value_type not in SCALAR_FORMATS:  # arrays of arrays are in the format and in no model
        raise Corrupt(f"it has a value of type {value_type}")
    return SCALAR_FORMATS[value_type]


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor over the same memory.  torch has no read-only tensors; nobody here writes to what the file gave."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def dequantize(blocks: RawBlocks) -> Tensor:
    """[rows, weights of a row]: float32, or float16 / bfloat16 where that is what is stored.

    Numbers: the products and sums in float32, in the order of the format's definition, so equal bit by bit to gguf.quants.
    """
    data = blocks.data
    if blocks.type in UNPACKERS:
        layout = BLOCK_LAYOUTS[blocks.type]
        num_rows = data.shape[0]
        flat = UNPACKERS[blocks.type](data.reshape(-1, layout.num_bytes))
        return flat.view(num_rows, -1)
    if blocks.type in STORED_FLOATS:
        return data.view(STORED_FLOATS[blocks.type])
    from gguf import GGMLQuantizationType, quants

    try:
        return torch.from_numpy(quants.dequantize(data.numpy(), GGMLQuantizationType(blocks.type)))
    except (ValueError, NotImplementedError) as error:
        raise StartError(f"weights stored as {blocks.type.name} can't be unpacked by the installed gguf package") from error


def half_column(blocks: Tensor, start: int) -> Tensor:
    """Two bytes of every block as a float16, widened: [blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes to [blocks, 32] float32: the low halves of all bytes come before the high halves."""
    weights = torch.empty(packed.shape[0], 2, packed.shape[1])
    weights[:, 0] = packed & 15
    weights[:, 1] = packed >> 4
    return weights.view(packed.shape[0], -1)


def unpack_q4_0(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:]).sub_(8.0).mul_(half_column(blocks, 0))


def unpack_q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).mul_(half_column(blocks, 0)).add_(half_column(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(half_column(blocks, 0))


UNPACKERS = {GgmlType.Q4_0: unpack_q4_0, GgmlType.Q4_1: unpack_q4_1, GgmlType.Q8_0: unpack_q8_0}
STORED_FLOATS = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
