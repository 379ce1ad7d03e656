"""CausalModel: what the runner asks of whoever computes logits: our `Decoder`, or a model run by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import DecoderInput
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionMetadata


class CausalModel(Protocol):
    config: ModelConfig
    dtype: torch.dtype

    @property
    def num_weight_bytes(self) -> int: ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row depends on nothing but its request."""
        ...

    @property
    def runs_only_kernels(self) -> bool:
        """Whether a decode step can be recorded as a tape; only a Decoder's can."""
        ...

    def set_rope_tables(self, tables: RopeTables) -> None: ...

    def allocate_buffers(self, max_num_tokens: int, max_num_logits: int) -> Any:
        """Whatever `forward` wants handed in again."""
        ...

    def forward(
        self,
        inputs: DecoderInput,
        metadata: AttentionMetadata,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: Any,
    ) -> Tensor:
        """[R, V] float32 of the wanted rows; kv_caches: K and V of each layer, written in place."""
        ...

    def finish_logits(self, logits: Tensor) -> Tensor: ...

    def close(self) -> None: ...
