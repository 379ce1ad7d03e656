"""Where a token's K and V lie in a block. The only place, besides the kernels, that knows.

CPU, bfloat16: pairs as `vdpbf16ps` wants them, along head_dim for q.k and along tokens for p.v
    K [num_blocks, num_kv_heads, head_dim/2, block_size, 2]     V [num_blocks, num_kv_heads, block_size/2, head_dim, 2]
CPU, float32:
    K [num_blocks, num_kv_heads, head_dim, block_size]          V [num_blocks, num_kv_heads, block_size, head_dim]
CUDA (and its emulation), any type:
    K and V [num_blocks, num_kv_heads, block_size, head_dim]

A slot is block_id * block_size + offset in the block. Reading and writing here is for twins and tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Shape = tuple[int, ...]


class KVLayout(ABC):
    @abstractmethod
    def shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Shape, Shape]:
        """Shapes of one layer's K tensor and V tensor."""

    @abstractmethod
    def block_size(self, k_cache: Tensor) -> int:
        """Tokens of a block."""

    @abstractmethod
    def read_blocks(self, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the blocks in order, copies [len(block_ids) * block_size, num_kv_heads, head_dim]."""

    @abstractmethod
    def write_slots(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [num_tokens, num_kv_heads, head_dim] at slots [num_tokens] int64."""


class PlainLayout(KVLayout):
    """CUDA's layout."""

    def shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Shape, Shape]:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return shape, shape

    def block_size(self, k_cache: Tensor) -> int:
        return k_cache.shape[2]

    def read_blocks(self, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (cache[block_ids.long()].transpose(1, 2).flatten(0, 1) for cache in (k_cache, v_cache))
        return k, v

    def write_slots(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        block_size = self.block_size(k_cache)
        blocks, offsets = slots // block_size, slots % block_size
        k_cache[blocks, :, offsets] = k
        v_cache[blocks, :, offsets] = v


class CpuLayout(KVLayout):
    """The CPU's layouts; the element type tells which."""

    def shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Shape, Shape]:
        if dtype == torch.float32:
            return (num_blocks, num_kv_heads, head_dim, block_size), (num_blocks, num_kv_heads, block_size, head_dim)
        return (
            (num_blocks, num_kv_heads, head_dim // 2, block_size, 2),
            (num_blocks, num_kv_heads, block_size // 2, head_dim, 2),
        )

    def block_size(self, k_cache: Tensor) -> int:
        return k_cache.shape[3]

    def read_blocks(self, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k_cache[block_ids.long()], v_cache[block_ids.long()]
        if k_cache.dtype == torch.float32:
            return k.permute(0, 3, 1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
        k = k.permute(0, 3, 1, 2, 4).flatten(3, 4)  # [blocks, block_size, heads, head_dim]
        v = v.permute(0, 2, 4, 1, 3).flatten(1, 2)
        return k.flatten(0, 1), v.flatten(0, 1)

    def write_slots(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        block_size = self.block_size(k_cache)
        blocks, offsets = slots // block_size, slots % block_size
        if k_cache.dtype == torch.float32:
            k_cache[blocks, :, :, offsets] = k
            v_cache[blocks, :, offsets] = v
        else:
            k_cache[blocks, :, :, offsets] = k.unflatten(-1, (-1, 2))
            v_cache[blocks, :, offsets // 2, :, offsets % 2] = v
