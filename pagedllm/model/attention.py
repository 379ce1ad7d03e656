"""The attention half of a layer: q, k, v in one product, then KV write and attention by the backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedllm.model.buffers import AttentionRows
from pagedllm.model.config import AttentionKind, ModelConfig
from pagedllm.model.host_memory import Memory, aligned
from pagedllm.model.linear import Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.model.norm import Norm, NormShape
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionShape
from pagedllm.ops.elementwise import clamp_rows


def qkv_shape(config: ModelConfig) -> LinearShape:
    kv_size = config.num_kv_heads * config.head_dim
    part_sizes = (config.num_q_heads * config.head_dim, kv_size, kv_size)
    return LinearShape(config.hidden_size, part_sizes, has_bias=config.has_qkv_bias)


def qk_norm_shapes(config: ModelConfig) -> dict[str, NormShape]:
    if config.qk_norm == "none":
        return {}
    head_dim, eps, offset = config.head_dim, config.norm_eps, config.norm_weight_offset
    num_heads = {"q_norm": config.num_q_heads, "k_norm": config.num_kv_heads}
    if config.qk_norm == "head":
        return {name: NormShape(head_dim, eps, weight_offset=offset) for name in num_heads}
    if config.qk_norm == "projection":
        return {name: NormShape(count * head_dim, eps, weight_offset=offset) for name, count in num_heads.items()}
    return {name: NormShape(head_dim, eps, "layer", num_heads=count) for name, count in num_heads.items()}


class Attention:
    def __init__(
        self,
        config: ModelConfig,
        kind: AttentionKind,
        weight_format: WeightFormat,
        memory: Memory,
        backend: AttentionBackend,
        namespace: str,
    ) -> None:
        self.namespace = namespace
        self.backend = backend
        self.kind = kind
        self.scale = config.attention_scale / kind.scale_divisor
        self.eps = config.norm_eps
        self.shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
        self.qkv = Linear(qkv_shape(config), weight_format, memory)
        self.norms = {name: Norm(shape, memory, namespace) for name, shape in qk_norm_shapes(config).items()}
        self.sinks = memory.take((config.num_q_heads,), torch.float32) if kind.has_sinks else None
        self.is_normed_first = config.qk_norm in ("projection", "layer_head")
        self.part_sizes = self.qkv.shape.part_sizes
        self.clip = config.qkv_clip
        is_normed_by_head = config.qk_norm == "head"  # beside the rotation
        self.q_norm = self.norms["q_norm"].weight if is_normed_by_head else None
        self.k_norm = self.norms["k_norm"].weight if is_normed_by_head else None
        self.is_interleaved = kind.rope is not None and kind.rope.is_interleaved
        self.rope_index = -1 if kind.rope is None else config.ropes.index(kind.rope)
        self.rope_table: Tensor | None = None  # [rows, rotary_dim], of `rope_index`

    @staticmethod
    def num_bytes(config: ModelConfig, kind: AttentionKind, weight_format: WeightFormat) -> int:
        norms = sum(Norm.num_bytes(shape) for shape in qk_norm_shapes(config).values())
        sinks = aligned(config.num_q_heads * torch.float32.itemsize) if kind.has_sinks else 0
        return Linear.num_bytes(qkv_shape(config), weight_format) + norms + sinks

    def slots(self) -> dict[str, WeightSlot]:
        slots = self.qkv.slots("q", "k", "v")
        for name, norm in self.norms.items():
            slots |= norm.slots(name)
        if self.sinks is not None:
            slots["sinks.sinks"] = WeightSlot(tuple(self.sinks.shape), self._load_sinks)
        return slots

    def _load_sinks(self, values: Tensor) -> None:
        assert self.sinks is not None
        self.sinks.copy_(values)

    def forward(
        self,
        rows: AttentionRows,
        x: Tensor,
        rope_rows: Sequence[Tensor],
        metadata: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
    ) -> None:
        """rows.out = attention(x [T, H]); rope_rows: per rope [T] int32."""
        kind = self.kind
        self.qkv.apply(self.namespace, rows.qkv, x)
        if self.is_normed_first:
            q_size, k_size, _ = self.part_sizes
            for norm, columns in zip(self.norms.values(), ((0, q_size), (q_size, q_size + k_size)), strict=True):
                part = rows.qkv[:, slice(*columns)]
                norm.apply(part, part)
        if self.clip:
            clamp_rows(self.namespace, rows.qkv, self.clip)
        self.backend.write_kv(
            rows.qkv,
            kv_cache,
            metadata.slot_mappings[kind.kv_group],
            self.rope_table,
            rope_rows[self.rope_index] if self.rope_index >= 0 else None,
            self.q_norm,
            self.k_norm,
            self.eps,
            self.shape,
            self.is_interleaved,
        )
        self.backend.attend(
            rows.out, rows.q, kv_cache, metadata, kind.kv_group, self.sinks, self.scale, kind.softcap, kind.window
        )
