"""The KV cache's tensors: one K and one V tensor a layer, all in one anonymous mapping.

The mapping is advised to use huge pages (4-14 % of a decode step on the machines measured) and is touched block by
block as text grows, so a pool that is larger than a job costs address space only. Who holds which block is the
business of `cache/`; how a block looks inside is the backend's.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from pagedllm.model.config import ModelConfig
from pagedllm.ops.attention import AttentionBackend

ALIGNMENT = 2 << 20  # a huge page


def bytes_per_block(config: ModelConfig, backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> int:
    """2 x block size x KV heads x head size x bytes per element x layers."""
    spec = backend.kv_cache_spec(1, block_size, config.num_kv_heads, config.head_dim, dtype)
    return spec.bytes_per_block * config.num_layers


class KVCache:
    """`layers[i]` is layer i's (K, V). `close` gives the memory back at once, whoever still holds a tensor."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        spec = backend.kv_cache_spec(num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = spec.bytes_per_block * num_blocks // 2  # of one tensor
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        self._mapping = mmap.mmap(-1, stride * 2 * config.num_layers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        pool = torch.frombuffer(self._mapping, dtype=dtype)
        tensors = [pool[i * stride // dtype.itemsize :][: size // dtype.itemsize] for i in range(2 * config.num_layers)]
        self.layers: list[tuple[Tensor, Tensor]] = [
            (k.view(spec.k_shape), v.view(spec.v_shape)) for k, v in zip(tensors[::2], tensors[1::2], strict=True)
        ]

    def close(self) -> None:
        self.layers.clear()
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)  # pages go now, even if a traceback still holds a tensor
