"""Every intermediate tensor of a forward pass, allocated once; a step takes views of their first rows.

Letters: T tokens of the step, R rows whose logits are wanted, H hidden_size, I intermediate_size, Q query heads,
K KV heads, D head_dim, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pagedllm.model.config import ModelConfig, MoeConfig
from pagedllm.model.linear import Epilogue


@dataclass(frozen=True, slots=True)
class MoeBuffers:
    """Of sparse layers; `moe` says what they are for. Letters: E experts, k experts a token."""

    router_logits: Tensor  # [rows, E] float32
    weights: Tensor  # [rows, k] float32
    places: Tensor  # [rows, k] int32
    tokens: Tensor  # [rows * k] int32
    bounds: Tensor  # [E + 1] int32
    gathered: Tensor  # [rows * k, H] what experts read, then what they gave
    intermediate: Tensor  # [rows * k, I]
    shared_intermediate: Tensor  # [rows, I]; this and the next two of models with a shared expert
    shared: Tensor  # [rows, H]
    shared_gates: Tensor  # [rows, 1] float32

    @staticmethod
    def allocate(
        moe: MoeConfig, hidden_size: int, dtype: torch.dtype, num_rows: int, device: torch.device
    ) -> MoeBuffers:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        num_chosen = moe.num_experts_per_token
        num_shared = num_rows if moe.shared_intermediate_size else 0
        return MoeBuffers(
            router_logits=empty(num_rows, moe.num_experts, dtype=torch.float32),
            weights=empty(num_rows, num_chosen, dtype=torch.float32),
            places=empty(num_rows, num_chosen, dtype=torch.int32),
            tokens=empty(num_rows * num_chosen, dtype=torch.int32),
            bounds=empty(moe.num_experts + 1, dtype=torch.int32),
            gathered=empty(num_rows * num_chosen, hidden_size),
            intermediate=empty(num_rows * num_chosen, moe.intermediate_size),
            shared_intermediate=empty(num_shared, moe.shared_intermediate_size),
            shared=empty(num_shared, hidden_size),
            shared_gates=empty(num_shared, 1, dtype=torch.float32),
        )

    def of_rows(self, num_rows: int) -> MoeBuffers:
        """Views for a step's rows."""
        num_places = num_rows * self.places.shape[1]
        return MoeBuffers(
            router_logits=self.router_logits[:num_rows],
            weights=self.weights[:num_rows],
            places=self.places[:num_rows],
            tokens=self.tokens[:num_places],
            bounds=self.bounds,
            gathered=self.gathered[:num_places],
            intermediate=self.intermediate[:num_places],
            shared_intermediate=self.shared_intermediate[:num_rows],
            shared=self.shared[:num_rows],
            shared_gates=self.shared_gates[:num_rows],
        )

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


@dataclass(frozen=True, slots=True)
class StepRows:
    """Views for one step, of all tokens or of the wanted rows; `rows` is T or R."""

    hidden: Tensor  # [rows, H] the residual stream
    normed: Tensor  # [rows, H] what the next product reads
    scratch: Tensor  # [rows, H] of models with post-norms
    attention: Tensor  # [rows, Q * D] what attention gave
    intermediate: Tensor  # [rows, I]
    onto_hidden: Epilogue  # adds `hidden`
    moe: MoeBuffers | None  # of models with sparse layers; whole


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Views for one step, of all tokens."""

    qkv: Tensor  # [T, (Q + 2 K) * D]
    q: Tensor  # [T, Q, D], a part of qkv
    out: Tensor  # [T, Q, D], the same memory as StepRows.attention


class DecoderBuffers:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_num_tokens: int,
        max_num_logits: int,
        device: torch.device,
    ) -> None:
        def allocate(num_rows: int, width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(num_rows, width, dtype=dtype, device=device)

        max_num_rows = max(max_num_tokens, max_num_logits)
        self.num_q_heads, self.head_dim = config.num_q_heads, config.head_dim
        self.q_size = config.num_q_heads * config.head_dim
        self.hidden = allocate(max_num_tokens, config.hidden_size)
        self.normed = allocate(max_num_rows, config.hidden_size)
        self.scratch = allocate(max_num_rows if config.has_post_norms else 0, config.hidden_size)
        self.qkv = allocate(max_num_tokens, self.q_size + 2 * config.num_kv_heads * config.head_dim)
        self.attention = allocate(max_num_tokens, self.q_size)
        is_dense = any(not layer.is_sparse for layer in config.layers)
        self.intermediate = allocate(max_num_rows, config.intermediate_size if is_dense else 0)
        self.moe = None
        if config.moe:
            self.moe = MoeBuffers.allocate(config.moe, config.hidden_size, dtype, max_num_rows, device)
        self.wanted_hidden = allocate(max_num_logits, config.hidden_size)
        self.wanted_attention = allocate(max_num_logits, self.q_size)
        self.logits = allocate(max_num_logits, config.vocab_size, torch.float32)  # a page of it is memory once written
        self.token_ids = torch.empty(max_num_logits, dtype=torch.int32, device=device)  # [R], in the logits' stead

    def step_rows(self, num_tokens: int) -> StepRows:
        return self._rows(num_tokens, self.hidden, self.attention)

    def wanted_rows(self, num_logits: int) -> StepRows:
        return self._rows(num_logits, self.wanted_hidden, self.wanted_attention)

    def attention_rows(self, num_tokens: int) -> AttentionRows:
        qkv = self.qkv[:num_tokens]
        heads = (self.num_q_heads, self.head_dim)
        return AttentionRows(
            qkv=qkv, q=qkv[:, : self.q_size].unflatten(1, heads), out=self.attention[:num_tokens].unflatten(1, heads)
        )

    @property
    def num_bytes(self) -> int:
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
        return own + (self.moe.num_bytes if self.moe else 0)

    def _rows(self, num_rows: int, hidden: Tensor, attention: Tensor) -> StepRows:
        assert num_rows <= len(hidden), f"{num_rows} rows, the buffers hold {len(hidden)}"
        hidden = hidden[:num_rows]
        return StepRows(
            hidden=hidden,
            normed=self.normed[:num_rows],
            scratch=self.scratch[:num_rows],
            attention=attention[:num_rows],
            intermediate=self.intermediate[:num_rows],
            onto_hidden=Epilogue(residual=hidden),
            moe=self.moe,
        )
