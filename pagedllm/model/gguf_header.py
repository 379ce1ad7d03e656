"""The header of a GGUF file: metadata and where each tensor lies. Knows the container, nothing of models.

An own reader, because gguf's takes 3.5 s for a vocabulary of 49 thousand tokens and 9.7 s for one of 262 thousand (a
numpy view per string; this one: 0.1 s and 0.3 s) and trusts every count and offset of the file. Here a file is hostile
until proved otherwise: each count, length and offset is compared with the bytes that are left before anything is
allocated, and every fault is a ModelError of one line. The file is mapped, not read. Called by gguf.py.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedllm.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4  # of llama.cpp
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY_ITEMS = 1 << 24  # in all arrays together; the largest vocabularies have a million entries
MAX_STRING = 1 << 26

STRING, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", FLOAT32: "<f4", BOOL: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

# name, values in a block, bytes of a block: all that the package gguf dequantizes
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
REFUSED_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in torch's order, the reverse of the file's; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_id][0]


class GGUFHeader:
    """`metadata`: key to int, float, bool, str, list of str or numpy array. `tensors`: name to TensorInfo."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError(f"{path}: the file is empty") from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        reader = _Reader(path, self.data)
        num_tensors, num_metadata = reader.start()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = reader.string("a key's name")
            if key in self.metadata:
                raise ModelError(f"{path}: the key {key!r} stands twice")
            self.metadata[key] = reader.value(reader.number("<I", key), key)
        self.tensors = reader.tensors(num_tensors, self._alignment())
        self.size = reader.position  # bytes of the header

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment must be a power of two >= 8, got {alignment!r}")
        return alignment

    @property
    def main_type(self) -> str:
        """The type of most values: "Q4_K", say."""
        num_values: Counter[str] = Counter()
        for info in self.tensors.values():
            num_values[info.type_name] += math.prod(info.shape)
        return num_values.most_common(1)[0][0] if num_values else "no tensors"

    @cached_property
    def header_bytes(self) -> bytes:
        return self.data[: self.size]

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes as stored: a view of the mapped file, [rows, bytes of a row]."""
        flat = np.frombuffer(self.data, np.uint8, info.num_bytes, info.offset)
        return flat.reshape(-1, info.num_bytes * info.shape[-1] // int(np.prod(info.shape, dtype=np.int64)))

    def release(self, info: TensorInfo) -> None:
        """Gives the tensor's pages back, which count as this process's while they are mapped."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, info.offset + info.num_bytes - start)


class _Reader:
    """A position in the mapped file that cannot leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.position = 0
        self.items_left = MAX_ARRAY_ITEMS

    def start(self) -> tuple[int, int]:
        """Counts of tensors and of metadata."""
        if self.data[:4] != MAGIC:
            start = bytes(self.data[:40])
            if start.startswith(b"version https://git-lfs"):
                raise ModelError(f"{self.path}: a Git LFS pointer, not the file itself: run `git lfs pull`")
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {start[:4]!r})")
        self.position = 4
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise ModelError(f"{self.path}: GGUF {what} is not supported, only little-endian of version 2 or 3")
        num_tensors, num_metadata = self.number("<Q", "the tensor count"), self.number("<Q", "the key count")
        for count, maximum, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_metadata, MAX_METADATA, "keys")):
            if count > maximum:
                raise ModelError(f"{self.path}: the header claims {count:,} {what}; damaged, or not meant for us")
        return num_tensors, num_metadata

    def take(self, num_bytes: int, what: str) -> int:
        """Moves past `num_bytes`; returns where they start."""
        start = self.position
        if num_bytes > self.end - start:
            raise ModelError(
                f"{self.path}: truncated or damaged: {what} needs {num_bytes:,} bytes at offset {start:,}, "
                f"the file has {self.end:,}"
            )
        self.position = start + num_bytes
        return start

    def number(self, form: str, what: str) -> int:
        value: int = struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]
        return value

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > MAX_STRING:
            raise ModelError(f"{self.path}: truncated or damaged: {what} claims {length:,} bytes")
        start = self.take(length, what)
        return self._text(self.data[start : start + length], what)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from None

    def value(self, type_id: int, key: str) -> Any:
        if type_id == STRING:
            return self.string(key)
        if type_id == ARRAY:
            return self._array(key)
        return self._numbers(type_id, 1, key)[0].item() if type_id != FLOAT32 else self._float(key)

    def _float(self, key: str) -> float:
        """float32 as the shortest decimal that gives it: 1e-05, not 9.999999747378752e-06."""
        return float(str(self._numbers(FLOAT32, 1, key)[0]))

    def _numbers(self, type_id: int, count: int, key: str) -> NDArray[Any]:
        if type_id not in SCALARS:
            raise ModelError(f"{self.path}: {key} has the unknown value type {type_id}")
        dtype = np.dtype(SCALARS[type_id])
        start = self.take(count * dtype.itemsize, key)
        values = np.frombuffer(self.data[start : self.position], np.uint8 if type_id == BOOL else dtype)
        return values != 0 if type_id == BOOL else values

    def _array(self, key: str) -> list[str] | NDArray[Any]:
        type_id, count = self.number("<I", key), self.number("<Q", key)
        if count > self.items_left:
            raise ModelError(f"{self.path}: truncated or damaged: {key} claims {count:,} items")
        self.items_left -= count
        if type_id == ARRAY:
            raise ModelError(f"{self.path}: {key} is an array of arrays, which is not supported")
        return self._strings(count, key) if type_id == STRING else self._numbers(type_id, count, key)

    def _strings(self, count: int, key: str) -> list[str]:
        """A loop over local variables: most of a header's bytes, and of its time, are here."""
        data, end, position = self.data, self.end, self.position
        if count * 8 > end - position:
            self.take(count * 8, key)
        items: list[bytes] = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > end:
                self.position = start
                self.take(position - start, f"item {len(items)} of {key}")
            items.append(data[start:position])
        self.position = position
        return [self._text(item, f"item {index} of {key}") for index, item in enumerate(items)]

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries = [self._tensor_entry() for _ in range(count)]
        data_start = -(-self.position // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in found:
                raise ModelError(f"{self.path}: the tensor {name!r} stands twice")
            if type_id not in TENSOR_TYPES:
                type_name = REFUSED_TYPES.get(type_id, f"number {type_id}")
                readable = ", ".join(sorted(entry[0] for entry in TENSOR_TYPES.values()))
                raise ModelError(
                    f"{self.path}: tensor {name} has type {type_name}, which is not read; read are {readable}"
                )
            _, block_values, block_bytes = TENSOR_TYPES[type_id]
            if shape[-1] % block_values:
                raise ModelError(
                    f"{self.path}: tensor {name}: rows of {shape[-1]} are no whole blocks of {block_values}"
                )
            num_bytes = block_bytes
            for size in (*shape[:-1], shape[-1] // block_values):
                num_bytes *= size
            if offset % alignment or data_start + offset + num_bytes > self.end:
                raise ModelError(
                    f"{self.path}: truncated or damaged: tensor {name} needs {num_bytes:,} bytes at offset "
                    f"{data_start + offset:,}, the file has {self.end:,}"
                )
            found[name] = TensorInfo(name, shape, type_id, data_start + offset, num_bytes)
        return found

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        num_dims = self.number("<I", name)
        if not 1 <= num_dims <= MAX_DIMS:
            raise ModelError(f"{self.path}: tensor {name!r} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
        shape = tuple(self.number("<Q", name) for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise ModelError(f"{self.path}: tensor {name!r} is empty: shape {list(shape)}")
        return name, shape, self.number("<I", name), self.number("<Q", name)
