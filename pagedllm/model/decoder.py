"""The one decoder: embedding, layers, head. ModelConfig says everything that differs between families.

Knows no requests and no schedule; `runtime` gives it tokens, rows of rope tables, attention metadata and KV tensors.
Nothing is allocated in a step. After the last attention only the rows whose logits are wanted go on.

Letters: T tokens of the step, R rows whose logits are wanted, H hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm.model.buffers import DecoderBuffers, StepRows
from pagedllm.model.config import ModelConfig
from pagedllm.model.host_memory import HostMemory, Memory
from pagedllm.model.layers import DecoderLayer
from pagedllm.model.linear import Linear, LinearShape, PackedFormat, WeightFormat, WeightSlot
from pagedllm.model.norm import Norm, hidden_norm
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata
from pagedllm.ops.elementwise import add_rows, finish_logits
from pagedllm.ops.linear import gather_rows


@dataclass(frozen=True, slots=True)
class DecoderInput:
    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    rope_rows: tuple[Tensor, ...]  # per ModelConfig.ropes: [T] int32, position + the variant's row_offset
    logits_indices: Tensor  # [R] int32, the tokens whose logits are wanted


def vocabulary_shape(config: ModelConfig) -> LinearShape:
    """Of the head and of the embedding."""
    return LinearShape(config.hidden_size, (config.vocab_size,))


def positions_shape(config: ModelConfig) -> LinearShape:
    """Of learned positions."""
    return LinearShape(config.hidden_size, (config.max_position,))


def weight_bytes(config: ModelConfig, weight_format: WeightFormat) -> int:
    """What the weights take in memory, known before anything is loaded."""
    num_vocabularies = 1 if config.is_tied else 2
    return (
        num_vocabularies * Linear.num_bytes(vocabulary_shape(config), weight_format)
        + (Linear.num_bytes(positions_shape(config), weight_format) if config.has_learned_positions else 0)
        + sum(DecoderLayer.num_bytes(config, layer, weight_format) for layer in config.layers)
        + Norm.num_bytes(hidden_norm(config))
    )


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        backend: AttentionBackend,
        namespace: str,
        weight_format: WeightFormat | None = None,
        allocate: Callable[[int], Memory] = HostMemory,
    ) -> None:
        """All weights are zero until `slots` are loaded.

        weight_format: default PackedFormat, for the CPU's kernels. allocate: makes the memory of so many bytes.
        """
        self.config = config
        self.dtype = dtype
        self.namespace = namespace
        weight_format = weight_format or PackedFormat(dtype)
        self.memory = allocate(weight_bytes(config, weight_format))
        self.head = Linear(vocabulary_shape(config), weight_format, self.memory)
        self._argmax_format = weight_format if isinstance(weight_format, PackedFormat) else None
        self.embedding = self.head if config.is_tied else Linear(self.head.shape, weight_format, self.memory)
        self.positions = (
            Linear(positions_shape(config), weight_format, self.memory) if config.has_learned_positions else None
        )
        self.embedding_scale = config.embedding_scale
        if config.is_embedding_scale_rounded:  # sqrt(640) is 25.25 in bfloat16
            self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype, device="cpu"))
        self.layers = [
            DecoderLayer(config, layer_config, weight_format, self.memory, backend, namespace)
            for layer_config in config.layers
        ]
        self.final_norm = Norm(hidden_norm(config), self.memory, namespace)
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            layer.next_norm = following.attention_norm
        self.layers[-1].next_norm = self.final_norm

    def slots(self) -> dict[str, WeightSlot]:
        """Every weight by its place: "embedding.weight", "layers.3.q.bias" ..."""
        slots = {**self.embedding.slots("embedding"), **self.final_norm.slots("final_norm")}
        if self.positions is not None:
            slots |= self.positions.slots("positions")
        if not self.config.is_tied:
            slots |= self.head.slots("head")
        for index, layer in enumerate(self.layers):
            slots |= {f"layers.{index}.{name}": slot for name, slot in layer.slots().items()}
        return slots

    def set_rope_tables(self, tables: RopeTables) -> None:
        """`tables` of this model's ropes, for the max_model_len in force."""
        for layer in self.layers:
            attention = layer.attention
            if attention.rope_index >= 0:
                attention.rope_table = tables.tables[attention.rope_index].to(self.memory.device)

    def allocate_buffers(self, max_num_tokens: int, max_num_logits: int) -> DecoderBuffers:
        return DecoderBuffers(self.config, self.dtype, max_num_tokens, max_num_logits, self.memory.device)

    def forward(
        self,
        inputs: DecoderInput,
        metadata: AttentionMetadata,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: DecoderBuffers,
        wants_likeliest: bool = False,
    ) -> Tensor:
        """`logits` of inputs.logits_indices; with wants_likeliest their `likeliest` token ids instead.

        kv_caches: K and V of each layer, written in place.
        """
        num_tokens = len(inputs.token_ids)
        rows = buffers.step_rows(num_tokens)
        attention_rows = buffers.attention_rows(num_tokens)
        self._embed(rows, inputs)
        for layer, kv_cache in zip(self.layers[:-1], kv_caches[:-1], strict=True):
            layer.attend(attention_rows, rows, inputs.rope_rows, metadata, kv_cache)
            layer.finish(rows)
        self.layers[-1].attend(attention_rows, rows, inputs.rope_rows, metadata, kv_caches[-1])
        compute = self.likeliest if wants_likeliest else self.logits
        return compute(inputs.logits_indices, rows, buffers)

    def logits(self, indices: Tensor, rows: StepRows, buffers: DecoderBuffers) -> Tensor:
        """[R, V] float32 of these tokens of the step that `forward` computed last, a view of buffers.logits.

        indices: [R] int32; rows: of the whole step.
        """
        logits = buffers.logits[: len(indices)]
        if len(logits):
            self.head.apply(self.namespace, logits, self._finish_wanted(rows, indices, buffers))
            if self.config.logit_scale != 1 or self.config.logit_softcap > 0:
                finish_logits(self.namespace, logits, self.config.logit_scale, self.config.logit_softcap)
        return logits

    def likeliest(self, indices: Tensor, rows: StepRows, buffers: DecoderBuffers) -> Tensor:
        """[R] int32: the ids of the largest `logits`, a view of buffers.token_ids; -1 where they are not finite."""
        assert self._argmax_format is not None
        token_ids = buffers.token_ids[: len(indices)]
        if len(token_ids):
            x, config = self._finish_wanted(rows, indices, buffers), self.config
            self._argmax_format.argmax(
                self.namespace, token_ids, x, self.head, config.logit_scale, config.logit_softcap
            )
        return token_ids

    @property
    def num_weight_bytes(self) -> int:
        return self.memory.num_taken

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row depends on nothing but its request: not where products are torch's (the twins, emulation)."""
        return self.namespace == "pagedllm"

    @property
    def finds_likeliest(self) -> bool:
        """Whether there is `likeliest`: where the head's product is our kernel."""
        return self._argmax_format is not None

    def close(self) -> None:
        """Gives the weights' memory back at once, whoever still holds a tensor; the decoder is dead afterwards."""
        self.memory.close()

    def _embed(self, rows: StepRows, inputs: DecoderInput) -> None:
        """The first `hidden`, and `normed` where attention reads that."""
        self.embedding.embed(self.namespace, rows.hidden, inputs.token_ids, self.embedding_scale)
        if self.positions is not None:
            self.positions.embed(self.namespace, rows.normed, inputs.positions, 1.0)
            add_rows(self.namespace, rows.hidden, rows.normed)
        first_norm = self.layers[0].attention_norm
        if first_norm is not None:
            first_norm.apply(rows.normed, rows.hidden)

    def _finish_wanted(self, rows: StepRows, indices: Tensor, buffers: DecoderBuffers) -> Tensor:
        """The last layer's second half for these rows only: what the head reads, [R, H]."""
        wanted = buffers.wanted_rows(len(indices))
        gather_rows(self.namespace, wanted.hidden, rows.hidden, indices)
        gather_rows(self.namespace, wanted.attention, rows.attention, indices)
        self.layers[-1].finish(wanted)
        return wanted.normed
