"""A step's numbers, from a ForwardBatch: what the decoder and attention read, in one list of arrays that is brought to
the device at once, and a workspace that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import DecoderInput
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionPlan, AttentionShape
from pagedllm.runtime.forward_batch import ForwardBatch

Array = NDArray[Any]


class MetadataBuilder:
    def __init__(
        self,
        backend: AttentionBackend,
        config: ModelConfig,
        block_size: int,
        device: torch.device,
        *,
        shares_prefixes: bool = True,
    ) -> None:
        """shares_prefixes: whether the backend may look for sequences that have blocks in common."""
        self.backend = backend
        self.block_size = block_size
        self.shares_prefixes = shares_prefixes
        self.shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
        self.num_ropes, self.num_groups = len(config.ropes), config.num_kv_groups
        self.windows = tuple(dict.fromkeys(config.kv_windows))
        self.plan_of_group = [self.windows.index(window) for window in config.kv_windows]
        self.workspace = torch.empty(0, dtype=torch.float32, device=device)

    def plan(self, batch: ForwardBatch) -> list[AttentionPlan]:
        """One for each of `windows`."""
        plans = []
        for index, window in enumerate(self.windows):
            tables = [
                table for table, plan in zip(batch.block_tables, self.plan_of_group, strict=True) if plan == index
            ]
            if not self.shares_prefixes:
                tables = []
            plans.append(self.backend.plan(batch.q_lens, batch.seq_lens, self.shape, tables, self.block_size, window))
        return plans

    def arrays(
        self, batch: ForwardBatch, rope_rows: Sequence[NDArray[np.int32]], plans: Sequence[AttentionPlan]
    ) -> list[Array]:
        """rope_rows: per rope [T]. `tensors` takes them in this order."""
        self.reserve(max(plan.workspace_size for plan in plans))
        return [
            batch.token_ids, batch.positions, batch.logits_indices, *rope_rows,
            batch.cu_seqlens_q, batch.seq_lens, *(plan.work for plan in plans), *(plan.merge for plan in plans),
            *batch.block_tables, *batch.slot_mappings,
        ]  # fmt: skip

    def reserve(self, workspace_size: int) -> None:
        if workspace_size > self.workspace.numel():
            self.workspace = torch.empty(workspace_size, dtype=torch.float32, device=self.workspace.device)

    def tensors(self, staged: Sequence[Tensor]) -> tuple[DecoderInput, AttentionMetadata]:
        """`arrays`, on the device. The workspace is reused by the next step."""
        token_ids, positions, logits_indices, *rest = staged
        rope_rows, (cu_seqlens_q, seq_lens, *rest) = rest[: self.num_ropes], rest[self.num_ropes :]
        num_plans = len(self.windows)
        work, merge, groups = rest[:num_plans], rest[num_plans : 2 * num_plans], rest[2 * num_plans :]
        return (
            DecoderInput(token_ids, positions, tuple(rope_rows), logits_indices),
            AttentionMetadata(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                block_tables=tuple(groups[: self.num_groups]),
                slot_mappings=tuple(groups[self.num_groups :]),
                work=tuple(work[plan] for plan in self.plan_of_group),
                merge=tuple(merge[plan] for plan in self.plan_of_group),
                workspace=self.workspace,
            ),
        )
