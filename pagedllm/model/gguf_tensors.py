"""Which tensors of a GGUF file make which of the Hugging Face checkpoint, and how they are put back in its order.

Each row is quantized by itself, so rows are moved as they are stored; columns only once they are numbers.
Called by gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedllm.errors import ModelError
from pagedllm.model.gguf_architectures import FALCON_TWO_NORMS, MODEL_NAMES, GGUFArchitecture, Order, Place
from pagedllm.model.gguf_header import GGUFHeader
from pagedllm.model.gguf_rope import FACTOR_TENSORS

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODEL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Source:
    """What a tensor of the checkpoint is made of: one tensor of the file, or two whose columns take turns."""

    files: tuple[str, ...]
    index: int | None = None  # a part of the first dimension; None: all of it
    order: Order = ""
    offset: float = 0.0
    is_transposed: bool = False

    def shape(self, header: GGUFHeader) -> tuple[int, ...]:
        shape = header.tensors[self.files[0]].shape
        shape = shape if self.index is None else shape[1:]
        if self.is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (*shape[:-1], shape[-1] * len(self.files))


def find_sources(header: GGUFHeader, architecture: GGUFArchitecture) -> dict[str, Source]:
    """By the checkpoint's names, in the file's order; a tensor without a known name is refused."""
    sources: dict[str, Source] = {}
    layers: Mapping[str, Place | None] = architecture.layers
    if "blk.0.attn_norm_2.weight" in header.tensors and architecture.name == "falcon":
        layers = FALCON_TWO_NORMS
    models = architecture.models or MODEL_NAMES
    for name in header.tensors:
        if name in FACTOR_TENSORS:
            continue
        layer, model = _LAYER_TENSOR.fullmatch(name), _MODEL_TENSOR.fullmatch(name)
        if layer and layer[2] in layers:
            prefix = f"{architecture.layer_prefix}{int(layer[1])}."
            sources |= _of_layer(header, name, prefix, layers[layer[2]], layer[3])
        elif model and model[1] in models:
            offset = architecture.norm_offset if model[1] == "output_norm" else 0.0
            sources[f"{models[model[1]]}.{model[2]}"] = Source((name,), offset=offset)
        else:
            raise ModelError(f"{header.path}: tensor {name} is unknown for the architecture {architecture.name}")
    return sources


def _of_layer(header: GGUFHeader, name: str, prefix: str, place: Place | None, kind: str) -> dict[str, Source]:
    if place is None:
        return {}
    files: tuple[str, ...] = (name,)
    if place.partner:
        partner = ".".join((*name.split(".")[:2], place.partner, kind))
        if partner not in header.tensors or header.tensors[partner].shape != header.tensors[name].shape:
            raise ModelError(f"{header.path}: tensor {partner} of the shape of {name} is missing")
        files = (name, partner)
    is_transposed = place.is_transposed and kind == "weight"
    if len(header.tensors[name].shape) < (2 if "{}" in place.module or is_transposed else 1):
        raise ModelError(f"{header.path}: tensor {name} has one dimension, two or more are expected")
    suffix = f".{kind}"
    if place.is_parameter:
        suffix = "" if kind == "weight" else "_bias"
    if "{}" not in place.module:
        return {f"{prefix}{place.module}{suffix}": Source(files, None, place.order, place.offset, is_transposed)}
    return {
        f"{prefix}{place.module.format(index)}{suffix}": Source(files, index, place.order, place.offset, is_transposed)
        for index in range(header.tensors[name].shape[0])
    }


def row_order(kind: Order, name: str, num_rows: int, config: Mapping[str, Any], header: GGUFHeader) -> NDArray[np.intp]:
    """The row of the file for each row of the checkpoint. name: the file's."""
    rows = np.arange(num_rows)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads", config.get("num_kv_heads", num_heads)))
    if kind == "halves":
        num_heads = num_kv_heads if ".attn_k." in name else num_heads
        if num_rows % (2 * num_heads):
            raise ModelError(f"{header.path}: {name} has {num_rows} rows, no multiple of 2 x {num_heads} heads")
        pairs: NDArray[np.intp] = rows.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return pairs
    if num_rows % (num_heads + 2 * num_kv_heads):
        raise ModelError(f"{header.path}: {name} has {num_rows} rows, no multiple of its heads' number")
    head_dim = num_rows // (num_heads + 2 * num_kv_heads)
    parts = np.split(rows, np.cumsum([num_heads, num_kv_heads]) * head_dim)
    groups: NDArray[np.intp] = np.concatenate([part.reshape(num_kv_heads, -1) for part in parts], 1).reshape(-1)
    return groups
