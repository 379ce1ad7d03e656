"""The keys of a GGUF header that describe the model: each is crossed off as it is read, and what is left is refused.

A setting that we do not know could change each token. Called by gguf_config.py and gguf_architectures.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagedllm.errors import ModelError
from pagedllm.model.gguf_header import GGUFHeader

# Keys that change nothing: descriptions, and hints for other programs. A trailing dot means all that begins so.
HARMLESS_KEYS = (
    "general.name", "general.type", "general.author", "general.version", "general.organization", "general.finetune",
    "general.basename", "general.description", "general.quantized_by", "general.size_label", "general.license",
    "general.license.", "general.url", "general.doi", "general.uuid", "general.repo_url", "general.source.",
    "general.base_model.", "general.dataset.", "general.datasets", "general.tags", "general.languages",
    "general.file_type", "general.quantization_version", "general.alignment", "general.architecture",
    "general.sampling.", "quantize.imatrix.", "tokenizer.",  # gguf_tokenizer.py accounts for these
)  # fmt: skip
HARMLESS_MODEL_KEYS = (
    "tensor_data_layout",  # of the file's history
    "rope.scaling.finetuned",  # a statement about training
)


def is_harmless(key: str) -> bool:
    return any(key == known or (known.endswith(".") and key.startswith(known)) for known in HARMLESS_KEYS)


class Keys:
    """The keys of one architecture, each crossed off as it is read; `refuse_rest` names what is left."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.path = header.path
        self.prefix = f"{architecture}."
        self.metadata = header.metadata
        self.left = {key for key in header.metadata if not is_harmless(key)}

    def has(self, key: str) -> bool:
        return self.prefix + key in self.metadata

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        full = self.prefix + key
        self.left.discard(full)
        value = self.metadata.get(full, default)
        if value is None:
            raise ModelError(f"{self.path}: the key {full} is missing")
        if isinstance(value, np.ndarray):  # per layer: taken where all layers agree
            if not value.size or (value != value[0]).any():
                raise ModelError(f"{self.path}: {full} differs between layers, which is not supported")
            value = value[0].item()
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ModelError(f"{self.path}: {full} has the wrong type: {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if not 0 < value < 1 << 31:
            raise ModelError(f"{self.path}: {self.prefix}{key} must be positive, got {value}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, (int, float), default))
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{self.path}: {self.prefix}{key} must be a positive number, got {value}")
        return value

    def require(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Some keys are accepted with the one value that asks for nothing."""
        self.left.discard(self.prefix + key)
        value = self.metadata.get(self.prefix + key, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise ModelError(f"{self.path}: {self.prefix}{key} = {value!r} is not supported: {why}")

    def refuse_rest(self) -> None:
        for key in HARMLESS_MODEL_KEYS:
            self.left.discard(self.prefix + key)
        if self.left:
            raise ModelError(f"{self.path}: unknown header keys: {', '.join(sorted(self.left))}")
