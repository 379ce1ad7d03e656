"""Attention metadata from a ForwardBatch: tensors over its arrays, the backend's work list, a workspace that grows."""

from __future__ import annotations

import torch

from pagedllm.model.config import ModelConfig
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionShape
from pagedllm.runtime.forward_batch import ForwardBatch


class MetadataBuilder:
    def __init__(self, backend: AttentionBackend, config: ModelConfig, block_size: int) -> None:
        self.backend = backend
        self.block_size = block_size
        self.shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
        self._workspace = torch.empty(0, dtype=torch.float32, device="cpu")

    def build(self, batch: ForwardBatch) -> AttentionMetadata:
        """Shares memory with the batch; the workspace is reused by the next step."""
        plan = self.backend.plan(batch.q_lens, batch.seq_lens, self.shape, batch.block_tables, self.block_size)
        if plan.workspace_size > self._workspace.numel():
            self._workspace = torch.empty(plan.workspace_size, dtype=torch.float32, device="cpu")
        return AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q),
            seq_lens=torch.from_numpy(batch.seq_lens),
            block_tables=tuple(torch.from_numpy(table) for table in batch.block_tables),
            slot_mappings=tuple(torch.from_numpy(slots) for slots in batch.slot_mappings),
            work=torch.from_numpy(plan.work),
            merge=torch.from_numpy(plan.merge),
            workspace=self._workspace,
        )
