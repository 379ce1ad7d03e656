"""Large blocks of memory from which tensors are cut: one mapping on the host, one allocation on a GPU.

Knows nothing of what they hold. The host's is advised to use huge pages: weights and KV cache are read end to end in
every step, and huge pages made a decode step 4-14 % faster on the machines measured. Pages that nobody writes cost
address space only.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedllm.errors import NotEnoughMemoryError

ALIGNMENT = 64  # of each tensor, bytes: a cache line and a vector register


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Memory(ABC):
    """Zeros, handed out in order. `close` gives them back at once, whoever still holds a tensor."""

    def __init__(self, zeros: Tensor) -> None:
        """zeros: [num_bytes] uint8"""
        self._bytes = zeros
        self.num_taken = 0  # bytes, alignment included

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, all zeros."""
        begin = self.num_taken
        end = begin + math.prod(shape) * dtype.itemsize
        assert end <= len(self._bytes), f"{end} bytes wanted of {len(self._bytes)}"
        self.num_taken = aligned(end)
        return self._bytes[begin:end].view(dtype).view(*shape)

    @abstractmethod
    def close(self) -> None: ...


class HostMemory(Memory):
    def __init__(self, num_bytes: int) -> None:
        try:
            self._mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise NotEnoughMemoryError(f"{num_bytes:,} bytes of memory cannot be had: {error.strerror}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(torch.frombuffer(self._mapping, dtype=torch.uint8))

    def close(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


class DeviceMemory(Memory):
    """Of torch's allocator; its tensors are dead after `close`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device))

    def close(self) -> None:
        self._bytes.untyped_storage().resize_(0)
