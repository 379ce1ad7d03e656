"""The KV cache's tensors, all in one mapping: a K and a V tensor for each layer of a KV group.

The groups' layers share them, first with first: a block belongs to one group at a time.

The mapping is touched block by block as text grows, so a pool that is larger than a job costs address space only. Who
holds which block is the business of `cache/`; how a block looks inside is the backend's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm.kv_groups import KVGroups
from pagedllm.model.config import ModelConfig
from pagedllm.model.host_memory import HostMemory, aligned
from pagedllm.ops.attention import AttentionBackend


def bytes_per_block(config: ModelConfig, backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> int:
    """2 x block size x KV heads x head size x bytes per element x layers of a KV group."""
    spec = backend.kv_cache_spec(1, block_size, config.num_kv_heads, config.head_dim, dtype)
    return spec.bytes_per_block * config.num_layers_per_block


@dataclass(frozen=True, slots=True)
class TextMemory:
    """KV bytes of one text at its largest."""

    num_bytes: int
    num_bytes_without_windows: int  # if every layer kept the whole text


def text_memory(config: ModelConfig, groups: KVGroups, num_tokens: int, bytes_per_block: int) -> TextMemory:
    bytes_per_layer = bytes_per_block // config.num_layers_per_block
    num_whole = -(-num_tokens // groups.block_size)
    return TextMemory(groups.num_blocks(num_tokens) * bytes_per_block, num_whole * config.num_layers * bytes_per_layer)


class KVCache:
    """`layers[i]` is layer i's (K, V), one of `tensors`.

    `close` gives the memory back at once, whoever still holds a tensor.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        spec = backend.kv_cache_spec(num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        tensor_bytes = aligned(spec.bytes_per_block * num_blocks // 2)
        self._memory = HostMemory(tensor_bytes * 2 * config.num_layers_per_block)
        self.tensors: list[tuple[Tensor, Tensor]] = [
            (self._memory.take(spec.k_shape, dtype), self._memory.take(spec.v_shape, dtype))
            for _ in range(config.num_layers_per_block)
        ]
        self.layers: list[tuple[Tensor, Tensor]] = []
        num_seen: Counter[int] = Counter()
        for layer in config.layers:
            group = layer.attention.kv_group
            self.layers.append(self.tensors[num_seen[group]])
            num_seen[group] += 1

    def close(self) -> None:
        self.layers.clear()
        self.tensors.clear()
        self._memory.close()
