"""The weight of an RMSNorm: float32, with the family's offset (Gemma stores w of 1 + w) added when it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.model.host_memory import HostMemory, aligned
from pagedllm.model.linear import WeightSlot


class NormWeight:
    def __init__(self, size: int, offset: float, memory: HostMemory) -> None:
        self.weight = memory.take((size,), torch.float32)
        self.offset = offset

    @staticmethod
    def num_bytes(size: int) -> int:
        """What the constructor takes of `memory`."""
        return aligned(size * torch.float32.itemsize)

    def slot(self) -> WeightSlot:
        return WeightSlot(tuple(self.weight.shape), self._load)

    def _load(self, values: Tensor) -> None:
        self.weight.copy_(values.float() + self.offset)
