"""The memories of interpreted PTX: tensors of the host, and the blocks' shared memory. Accesses out of bounds raise."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.simt.emulator import TensorTraffic

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class PtxError(Exception):
    pass


class GlobalMemory:
    def __init__(self, tensors: dict[str, TensorTraffic]) -> None:
        held = sorted((t for t in tensors.items() if t[1].end > t[1].begin), key=lambda item: item[1].begin)
        self.names = [name for name, _ in held]
        self.tensors = [tensor for _, tensor in held]
        self.begins = np.array([t.begin for t in self.tensors], np.uint64)
        self.bytes = [
            np.frombuffer((ctypes.c_uint8 * (t.end - t.begin)).from_address(t.begin), np.uint8) for t in self.tensors
        ]

    def _find(
        self, addresses: NDArray[np.uint64], size: int, is_write: bool, at: str
    ) -> Iterator[tuple[int, Ints, Ints]]:
        if (addresses % size).any():
            raise PtxError(f"misaligned address at {at}")
        indices = np.searchsorted(self.begins, addresses, "right") - 1
        for index in np.unique(indices):
            lanes = np.flatnonzero(indices == index)
            if index < 0:
                raise PtxError(f"address before every tensor at {at}")
            tensor = self.tensors[index]
            offsets = (addresses[lanes] - np.uint64(tensor.begin)).astype(np.int64)
            if (offsets + size > tensor.end - tensor.begin).any():
                raise PtxError(f"{self.names[index]}: byte {offsets.max()} is out of bounds at {at}")
            if is_write and not tensor.is_writable:
                raise PtxError(f"{self.names[index]} is only read, but written at {at}")
            yield int(index), offsets, lanes

    def load(self, addresses: NDArray[np.uint64], size: int, at: str) -> Bytes:
        """[lanes, size]"""
        raw = np.empty((len(addresses), size), np.uint8)
        for index, offsets, lanes in self._find(addresses, size, False, at):
            raw[lanes] = self.bytes[index][offsets[:, None] + np.arange(size)]
        return raw

    def store(self, addresses: NDArray[np.uint64], raw: Bytes, at: str) -> None:
        size = raw.shape[1]
        for index, offsets, lanes in self._find(addresses, size, True, at):
            self.bytes[index][offsets[:, None] + np.arange(size)] = raw[lanes]


class SharedMemory:
    """[num_blocks, size] bytes, poisoned with NaN."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.flat = np.full(num_blocks * size, 0xFF, np.uint8)

    def where(self, blocks: Ints, addresses: NDArray[np.uint32], size: int, at: str) -> Ints:
        offsets = addresses.astype(np.int64)
        if (offsets + size > self.size).any() or (offsets % size).any():
            raise PtxError(f"shared byte {offsets.max()} of {self.size} is out of bounds or misaligned at {at}")
        return blocks * self.size + offsets

    def load(self, blocks: Ints, addresses: NDArray[np.uint32], size: int, at: str) -> Bytes:
        return self.flat[self.where(blocks, addresses, size, at)[:, None] + np.arange(size)]

    def store(self, blocks: Ints, addresses: NDArray[np.uint32], raw: Bytes, at: str) -> None:
        size = raw.shape[1]
        self.flat[self.where(blocks, addresses, size, at)[:, None] + np.arange(size)] = raw
