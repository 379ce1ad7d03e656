"""Reads a model folder: config.json and safetensors, one file or shards. No pickle, nothing is executed.

Whatever is missing, torn or contradictory is a ModelError of one line that names the file and says how to mend it.
Tensors are read, not mapped: pages of a mapped file would count as ours beside the packed weights.
Knows nothing of families; `loader` decides what each tensor is for.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedllm.errors import ModelError
from pagedllm.model.hf_config import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Mistral's own format; it is found beside a complete set in the usual one.
FOREIGN_PREFIX = "consolidated"
LFS_POINTER = b"version https://git-lfs"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class Stored:
    """The weights on the disk; kind: what most of their values are, "bfloat16" or "4-bit"."""

    num_bytes: int
    kind: str


class Checkpoint(Protocol):
    """Weights under their Hugging Face names, and the config in config.json's form."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """A new tensor: all of it, or a range of its first dimension."""
        ...


Check = Callable[
    [Checkpoint, Stored], None
]  # looks at the headers before anything large is read; raises if they are no good


def read_json(path: Path) -> dict[str, Any]:
    """A file that must hold a JSON object."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: download the whole model folder") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    _refuse_lfs_pointer(path, content)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}: download it again")
    return value


class SafetensorsCheckpoint:
    """A folder as `save_pretrained` writes it."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        if not self.path.is_dir():
            raise ModelError(f"{self.path} is not a folder: pass the path of a model folder")
        self.config: Mapping[str, Any] = read_json(self.path / "config.json")
        generation_config = self.path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(generation_config) if generation_config.exists() else {}
        self._files: dict[str, _File] = {}  # of each tensor, in the files' order
        for file_name in self._find_files():
            file = _File(self.path / file_name)
            for name in file.entries:
                if name in self._files:
                    raise ModelError(
                        f"{file.path} holds {shown(name)}, and so does {self._files[name].path}: keep one of them"
                    )
                self._files[name] = file
        self._check_index()

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].dtype(name)

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        return self._files[name].read(name, rows)

    @property
    def stored(self) -> Stored:
        num_values: Counter[str] = Counter()
        for name in self._files:
            num_values[str(self.dtype(name)).removeprefix("torch.")] += math.prod(self.shape(name))
        files = {file.path for file in self._files.values()}
        kind = num_values.most_common(1)[0][0] if num_values else "no tensors"
        return Stored(sum(path.stat().st_size for path in files), kind)

    def _find_files(self) -> list[str]:
        """The files of the one set of weights that the folder holds."""
        present = sorted(p.name for p in self.path.glob("*.safetensors") if not p.name.startswith(FOREIGN_PREFIX))
        self._weight_map: dict[str, str] = {}
        if (self.path / INDEX_FILE).exists():
            self._weight_map = _read_index(self.path / INDEX_FILE)
            indexed = sorted(set(self._weight_map.values()))
            for name in indexed:
                if name not in present:
                    raise ModelError(f"{self.path / name} is missing, {INDEX_FILE} names it: download it again")
            extra = [name for name in present if name not in indexed]
            if extra:
                raise ModelError(
                    f"{self.path / extra[0]} is not named by {INDEX_FILE}: the folder may hold two sets of weights; "
                    "move one of them away"
                )
            return indexed
        if len(present) == 1 and "-of-" not in present[0]:
            return present
        if present and any("-of-" in name for name in present):
            raise ModelError(f"{self.path / INDEX_FILE} is missing beside {present[0]}: download it again")
        if present:
            raise ModelError(
                f"{self.path} holds {' and '.join(present)}: keep one set of weights, move the others away"
            )
        pickles = sorted(p.name for p in self.path.glob("*.bin")) + sorted(p.name for p in self.path.glob("*.pth"))
        if pickles:
            raise ModelError(
                f"{self.path} holds {pickles[0]}, a pickle, which is never read: convert it with transformers' "
                "save_pretrained"
            )
        raise ModelError(f"{self.path / SINGLE_FILE} is missing: download the whole model folder")

    def _check_index(self) -> None:
        for name, file_name in self._weight_map.items():
            file = self._files.get(name)
            if file is None or file.path.name != file_name:
                where = f"names {shown(name)} in {file_name}, which does not hold it"
                raise ModelError(f"{self.path / INDEX_FILE} {where}: download both again")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a safetensors file: its type in the file's words, and its first byte."""

    kind: str
    shape: tuple[int, ...]
    begin: int


class _File:
    """One open safetensors file; its header has been checked, by the library, against its length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb", buffering=0)
            start = os.pread(self._stream.fileno(), len(LFS_POINTER), 0)
            _refuse_lfs_pointer(path, start)
            with safe_open(path, framework="pt", device="cpu") as reader:
                names: list[str] = cast(Any, reader).offset_keys()
            header_size = int.from_bytes(start[:8], "little")
            header = json.loads(os.pread(self._stream.fileno(), header_size, 8))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        except (SafetensorError, ValueError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}): download it again") from None
        self.entries: dict[str, _Entry] = {}
        for name in names:
            entry = header[name]
            begin = 8 + header_size + entry["data_offsets"][0]
            self.entries[name] = _Entry(entry["dtype"], tuple(entry["shape"]), begin)

    def dtype(self, name: str) -> torch.dtype:
        kind = self.entries[name].kind
        if kind not in DTYPES:
            raise ModelError(f"{self.path}: {shown(name)} is of type {kind}, which is not supported")
        return DTYPES[kind]

    def read(self, name: str, rows: slice) -> Tensor:
        entry, dtype = self.entries[name], self.dtype(name)
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        first, end, _ = rows.indices(entry.shape[0]) if entry.shape else (0, 1, 1)
        content = torch.empty((end - first) * row_bytes, dtype=torch.uint8, device="cpu")
        self._fill(content.numpy().data, entry.begin + first * row_bytes, name)
        return content.view(dtype).view(end - first, *entry.shape[1:]) if entry.shape else content.view(dtype)[0]

    def _fill(self, target: memoryview, position: int, name: str) -> None:
        while target:
            try:
                count = os.preadv(self._stream.fileno(), [target], position)
            except OSError as error:
                raise ModelError(f"{self.path}: {shown(name)} cannot be read: {error.strerror}") from None
            if count == 0:
                raise ModelError(f"{self.path}: the file ends within {shown(name)}: it was changed while it was read")
            target, position = target[count:], position + count


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map from tensors to files: download it again")
    for name, file_name in weight_map.items():
        is_name = isinstance(file_name, str) and Path(file_name).name == file_name and file_name.isprintable()
        if not is_name or not file_name.endswith(".safetensors"):
            raise ModelError(f"{path} names {file_name!r} for {shown(name)}: a safetensors file beside it is expected")
    return weight_map


def _refuse_lfs_pointer(path: Path, content: bytes) -> None:
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
