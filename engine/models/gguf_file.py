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
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.gguf_blocks import BLOCK_LAYOUTS, GgmlType, RawBlocks, dequantize

GGUF_MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

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

    def strings(self, count: int) -> list[str]:
        """As many calls of string(); kept tight because a vocabulary and its merges have 10^5 of them."""
        data, offset, found = self.data, self.offset, []
        for _ in range(count):
            start = offset + LENGTH.size
            if start > self.size:
                break
            offset = start + LENGTH.unpack_from(data, offset)[0]
            if offset > self.size:
                break
            found.append(data[start:offset].decode("utf-8", errors="replace"))
        if len(found) < count:
            raise Corrupt(f"it ends at byte {self.size}, in the middle of an array")
        self.offset = offset
        return found

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
        """As many calls of string() without the strings; kept tight as `strings` is."""
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
            return self.strings(count)
        code = scalar_format(element_type)
        start = self.advance(count * struct.calcsize("<" + code))
        return np.frombuffer(self.data, dtype=np.dtype("<" + code), count=count, offset=start).tolist()


def scalar_format(value_type: int) -> str:
    if value_type not in SCALAR_FORMATS:  # arrays of arrays are in the format and in no model
        raise Corrupt(f"it has a value of type {value_type}")
    return SCALAR_FORMATS[value_type]


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor over the same memory.  torch has no read-only tensors; nobody here writes to what the file gave."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
