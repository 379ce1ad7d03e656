"""A GGUF file as a checkpoint in HF's form: config.json's keys, HF's tensor names, weights as HF stores them.

Differences between the two forms end here: what llama.cpp's converter rearranged is put back
(gguf_architectures.py says what), quantized tensors become float32. Normally a file is converted once and read as a
folder (`open_gguf`, gguf_cache.py). Needs the extra `gguf`, whose dequantization is used. Called by loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import ALL_ROWS, Check, Checkpoint, SafetensorsCheckpoint, Stored
from pagedllm.model.gguf_config import find_architecture, hf_config, hf_generation_config
from pagedllm.model.gguf_header import GGUFHeader, TensorInfo
from pagedllm.model.gguf_tensors import Source, find_sources, row_order
from pagedllm.model.gguf_tokenizer import GGUFVocabulary, tokenizer_files

# Dequantized at once. It stays in the cache until it is rounded, and torch does not start threads for so little: on a
# busy machine their waiting for each other made a conversion of one second take minutes.
SLAB_VALUES = 1 << 15


class GGUFCheckpoint:
    """Reads tensors one at a time, each dequantized to float32."""

    def __init__(self, file: Path | str, header: GGUFHeader | None = None) -> None:
        """`header`: the file's, where the caller has read it."""
        _need_gguf()
        self.path = Path(file)
        self.header = header or GGUFHeader(self.path)
        self.config: Mapping[str, Any] = hf_config(self.header, self._rope_factors)
        self._sources = find_sources(self.header, find_architecture(self.header))
        self._vocabulary = GGUFVocabulary(self.header)
        self.generation_config: Mapping[str, Any] = hf_generation_config(self.header, self._vocabulary.eos_token_ids)

    def tokenizer_files(self) -> dict[str, str]:
        """File name to content: tokenizer.json, tokenizer_config.json, chat templates."""
        return tokenizer_files(self._vocabulary)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape(self.header)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = ALL_ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor; another dtype than float32 is rounded from it."""
        source = self._source(name)
        if not source.is_transposed and len(source.files) == 1:
            return self._read_part(source, source.files[0], rows, dtype)
        parts = [self._read_part(source, file, ALL_ROWS, dtype) for file in source.files]
        if source.is_transposed:
            parts = [part.transpose(-1, -2) for part in parts]
        return torch.stack(parts, -1).flatten(-2)[rows]

    def _read_part(self, source: Source, file: str, rows: slice, dtype: torch.dtype) -> Tensor:
        """One tensor of the file, its rows (of a vector, its values) in the checkpoint's order."""
        info = self.header.tensors[file]
        raw, shape = self.header.raw(info), info.shape
        if source.index is not None:
            raw, shape = raw.reshape(shape[0], -1, raw.shape[-1])[source.index], shape[1:]
        order: slice | NDArray[np.intp] = ALL_ROWS
        if source.order:
            order = row_order(source.order, file, shape[0], self.config, self.header)
        if len(shape) == 1:
            values = self._dequantize(info, raw.reshape(1, -1)).reshape(-1)[order][rows]
            return torch.from_numpy(values - np.float32(source.offset)).to(dtype)
        raw = raw.reshape(shape[0], -1, raw.shape[-1])[order][rows]
        tensor = torch.empty(len(raw), *shape[1:], dtype=dtype, device="cpu")
        self._fill(tensor.view(-1, shape[-1]), raw.reshape(-1, raw.shape[-1]), info, source.offset)
        self.header.release(info)
        return tensor

    def _fill(self, matrix: Tensor, raw: NDArray[np.uint8], info: TensorInfo, offset: float) -> None:
        step = max(1, SLAB_VALUES // matrix.shape[1])
        for start in range(0, len(raw), step):
            values = torch.from_numpy(self._dequantize(info, raw[start : start + step]))
            matrix[start : start + step] = values - offset if offset else values

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise ModelError(f"{self.path}: there is no tensor {name}")
        return self._sources[name]

    def _rope_factors(self, name: str) -> NDArray[np.float32]:
        info = self.header.tensors[name]
        return self._dequantize(info, self.header.raw(info)).reshape(-1)

    def _dequantize(self, info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[rows, bytes of a row] -> [rows, values], never a view of the file."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # odd scales of a damaged file; non-finite logits are found later
            values = dequantize(raw, GGMLQuantizationType(info.type_id))
        return values.copy() if info.type_name == "F32" else values


def open_gguf(
    file: Path | str, dtype: str = "bfloat16", cache_dir: Path | None = None, check: Check | None = None
) -> Checkpoint:
    """The cached conversion of the file, made now if there is none; the file itself where no cache can be written.

    check: is given the checkpoint, before any conversion, and how the file stores it.
    """
    from pagedllm.model.gguf_cache import convert_gguf

    header = GGUFHeader(Path(file))
    stored = stored_in(header)
    checked: list[Checkpoint] = []

    def check_first(checkpoint: Checkpoint) -> None:
        checked.append(checkpoint)
        if check is not None:
            check(checkpoint, stored)

    folder = convert_gguf(file, cache_dir, dtype, header=header, check=check_first)
    checkpoint = SafetensorsCheckpoint(folder) if folder is not None else GGUFCheckpoint(file, header)
    if not checked:
        check_first(checkpoint)
    return checkpoint


def stored_in(header: GGUFHeader) -> Stored:
    """Q4_K is 4-bit, BF16 16-bit."""
    bits = re.search(r"\d+", header.main_type)
    return Stored(len(header.data), f"{bits[0]}-bit" if bits else header.main_type)


def _need_gguf() -> None:
    try:
        import gguf.quants  # noqa: F401
    except ImportError as error:
        raise ModelError(f"GGUF files need the package gguf ({error}): pip install pagedllm[gguf]") from error
