"""Norms of rows: RMSNorm or LayerNorm, weights in float32.

The family's offset (Gemma stores w of 1 + w) is added to the weight when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagedllm.model.config import ModelConfig, NormKind
from pagedllm.model.host_memory import Memory, aligned
from pagedllm.model.linear import WeightSlot
from pagedllm.ops.elementwise import add_rows
from pagedllm.ops.norm import add_rms_norm, layer_norm, layer_norm_heads, rms_norm


@dataclass(frozen=True, slots=True)
class NormShape:
    size: int
    eps: float
    kind: NormKind = "rms"
    has_bias: bool = False
    weight_offset: float = 0.0
    num_heads: int = 1  # of kind "layer": parts of `size` each that are normed by themselves


def hidden_norm(config: ModelConfig) -> NormShape:
    """Of every norm of the residual stream."""
    return NormShape(
        config.hidden_size, config.norm_eps, config.norm_kind, config.has_norm_bias, config.norm_weight_offset
    )


class Norm:
    def __init__(self, shape: NormShape, memory: Memory, namespace: str) -> None:
        assert shape.kind == "layer" or not (shape.has_bias or shape.num_heads > 1)
        self.shape = shape
        self.namespace = namespace
        self.weight = memory.take(
            (shape.num_heads, shape.size) if shape.num_heads > 1 else (shape.size,), torch.float32
        )
        self.bias = memory.take((shape.size,), torch.float32) if shape.has_bias else None

    @staticmethod
    def num_bytes(shape: NormShape) -> int:
        """What the constructor takes of `memory`."""
        return (2 if shape.has_bias else 1) * aligned(shape.num_heads * shape.size * torch.float32.itemsize)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        slots = {f"{name}.weight": self._slot(self.weight, self.shape.weight_offset)}
        if self.bias is not None:
            slots[f"{name}.bias"] = self._slot(self.bias, 0.0)
        return slots

    def apply(self, out: Tensor, x: Tensor) -> None:
        """out = norm(x), both [num_rows, num_heads * size]; `out` may be `x`."""
        if self.shape.kind == "rms":
            rms_norm(self.namespace, out, x, self.weight, self.shape.eps)
        elif self.shape.num_heads > 1:
            layer_norm_heads(self.namespace, out, x, self.weight, self.shape.eps)
        else:
            layer_norm(self.namespace, out, x, self.weight, self.bias, self.shape.eps)

    def add_apply(self, out: Tensor, residual: Tensor, x: Tensor) -> None:
        """residual += x; out = norm(residual)."""
        if self.shape.kind == "rms":
            add_rms_norm(self.namespace, out, residual, x, self.weight, self.shape.eps)
        else:
            add_rows(self.namespace, residual, x)
            self.apply(out, residual)

    def _slot(self, target: Tensor, offset: float) -> WeightSlot:
        return WeightSlot(tuple(target.shape), partial(_load, target, offset, 0), partial(_load, target, offset))


def _load(target: Tensor, offset: float, first: int, values: Tensor) -> None:
    target[first : first + len(values)] = values.float() + offset
