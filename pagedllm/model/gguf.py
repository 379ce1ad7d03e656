"""A GGUF file as a checkpoint in HF's form: config.json's keys, HF's tensor names, weights as HF stores them.

Differences between the two forms end here: rows of q and k of `llama` are put back in HF's order, Gemma's norm weights
lose the 1 that the converter added, quantized tensors become float32. Normally a file is converted once and read as a
folder (`open_gguf`, gguf_cache.py). Needs the extra `gguf`, whose dequantization is used. Called by loader.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import ALL_ROWS, Checkpoint, SafetensorsCheckpoint
from pagedllm.model.gguf_config import ROPE_FREQS, hf_config, hf_generation_config, hf_tensor_names
from pagedllm.model.gguf_header import GGUFHeader, TensorInfo
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
        self.config: Mapping[str, Any] = hf_config(self.header, self._rope_freqs)
        self.architecture = str(self.header.metadata["general.architecture"])
        self._names = hf_tensor_names(self.header, self.architecture)
        self._vocabulary = GGUFVocabulary(self.header)
        self.generation_config: Mapping[str, Any] = hf_generation_config(self.header, self._vocabulary.eos_token_ids)

    def tokenizer_files(self) -> dict[str, str]:
        """File name to content: tokenizer.json, tokenizer_config.json, chat templates."""
        return tokenizer_files(self._vocabulary)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = ALL_ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor; another dtype than float32 is rounded from it."""
        info = self._info(name)
        raw = self.header.raw(info)
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            kind = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            raw = unpermute(raw.reshape(info.shape[0], -1), self.config[kind], name, self.path).reshape(raw.shape)
        raw = raw.reshape(info.shape[0], -1)[rows]
        tensor = torch.empty(len(raw), *info.shape[1:], dtype=dtype, device="cpu")
        values_of = tensor.view(len(raw), -1)
        step = max(1, SLAB_VALUES // values_of.shape[1])
        for start in range(0, len(raw), step):
            values = torch.from_numpy(self._dequantize(info, raw[start : start + step]))
            if self.architecture == "gemma3" and name.endswith("norm.weight"):
                values -= 1
            values_of[start : start + step] = values
        return tensor

    def _info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise ModelError(f"{self.path}: there is no tensor {name}")
        return self.header.tensors[self._names[name]]

    def _rope_freqs(self) -> NDArray[np.float32]:
        info = self.header.tensors[ROPE_FREQS]
        return self._dequantize(info, self.header.raw(info)).reshape(-1)

    def _dequantize(self, info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[rows, bytes of a row] -> [rows, values], never a view of the file."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # odd scales of a damaged file; non-finite logits are found later
            values = dequantize(raw, GGMLQuantizationType(info.type_id))
        return values.copy() if info.type_name == "F32" else values


def unpermute(rows: NDArray[np.uint8], num_heads: int, name: str, path: Path) -> NDArray[np.uint8]:
    """[num_heads * head_dim, bytes]: in each head, rows 0, 2, 4, ... 1, 3, 5, ... as `rotate_half` wants them.

    llama.cpp's converter interleaves the two halves, because its rope rotates neighbours. Each row is quantized by
    itself, so rows are moved as they are stored.
    """
    if len(rows) % (2 * num_heads):
        raise ModelError(f"{path}: {name} has {len(rows)} rows, no multiple of 2 x {num_heads} heads")
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    ordered: NDArray[np.uint8] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return ordered


def open_gguf(file: Path | str, dtype: str = "bfloat16", cache_dir: Path | None = None) -> Checkpoint:
    """The cached conversion of the file, made now if there is none; the file itself where no cache can be written."""
    from pagedllm.model.gguf_cache import convert_gguf

    folder = convert_gguf(file, cache_dir, dtype)
    return SafetensorsCheckpoint(folder) if folder is not None else GGUFCheckpoint(file)


def _need_gguf() -> None:
    try:
        import gguf.quants  # noqa: F401
    except ImportError as error:
        raise ModelError(f"GGUF files need the package gguf ({error}): pip install pagedllm[gguf]") from error
