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
    def finds_likeliest(self) -> bool:
        """Whether `forward` can give token ids instead of logits."""
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
        wants_likeliest: bool = False,
    ) -> Tensor:
        """Logits [R, V] float32 of the wanted rows, as the model means them. With wants_likeliest, where it
        `finds_likeliest`, [R] int32 instead: the id of each row's largest logit, the lowest of equal ones, -1 where
        they are not finite. kv_caches: K and V of each layer, written in place."""
        ...

    def close(self) -> None: ...
