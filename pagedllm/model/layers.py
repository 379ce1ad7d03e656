"""One decoder layer: attention, and what follows on the rows that are still wanted.

A layer finds its normed input ready and leaves the next layer's ready, so that every norm stands beside the addition
before it. Additions without a norm between are epilogues of the products. The orders there are, h the residual stream:

    usual              h += attention(norm(h));                  h += mlp(norm(h))
    parallel           h += attention(norm(h)) + mlp(norm'(h)),  norm' a norm of its own or the same
    post-norms too     h += norm(attention(norm(h)));            h += norm(mlp(norm(h)))
    post-norms only    h += norm(attention(h));                  h += norm(mlp(h))
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagedllm.model.attention import Attention
from pagedllm.model.buffers import AttentionRows, StepRows
from pagedllm.model.config import LayerConfig, ModelConfig
from pagedllm.model.host_memory import Memory
from pagedllm.model.linear import Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.model.mlp import MLP
from pagedllm.model.moe import MoE
from pagedllm.model.norm import Norm, hidden_norm
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata
from pagedllm.ops.elementwise import add_rows


def output_shape(config: ModelConfig) -> LinearShape:
    """Of the attention's output."""
    return LinearShape(config.num_q_heads * config.head_dim, (config.hidden_size,), has_bias=config.has_output_bias)


def norm_names(config: ModelConfig) -> tuple[str, ...]:
    pre_norms = ("attention_norm", "mlp_norm") if config.has_mlp_norm else ("attention_norm",)
    post_norms = ("post_attention_norm", "post_mlp_norm")
    return (pre_norms if config.has_pre_norms else ()) + (post_norms if config.has_post_norms else ())


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        layer_config: LayerConfig,
        weight_format: WeightFormat,
        memory: Memory,
        backend: AttentionBackend,
        namespace: str,
    ) -> None:
        assert config.has_pre_norms or config.has_post_norms
        assert config.has_mlp_norm or config.is_parallel
        assert not (config.is_parallel and config.has_post_norms)
        self.namespace = namespace
        self.is_parallel, self.has_post_norms = config.is_parallel, config.has_post_norms
        self.attention = Attention(config, layer_config.attention, weight_format, memory, backend, namespace)
        self.output = Linear(output_shape(config), weight_format, memory)
        self.mlp: MLP | MoE
        if layer_config.is_sparse:
            self.mlp = MoE(config, weight_format, memory, namespace)
        else:
            self.mlp = MLP(config, config.intermediate_size, weight_format, memory, namespace)
        self.norms = {name: Norm(hidden_norm(config), memory, namespace) for name in norm_names(config)}
        self.attention_norm = self.norms.get("attention_norm")
        self.mlp_norm = self.norms.get("mlp_norm", self.attention_norm)
        self.next_norm: Norm | None = None  # the decoder sets the next layer's attention_norm, or its own

    @staticmethod
    def num_bytes(config: ModelConfig, layer_config: LayerConfig, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        if layer_config.is_sparse:
            mlp_bytes = MoE.num_bytes(config, weight_format)
        else:
            mlp_bytes = MLP.num_bytes(config, config.intermediate_size, weight_format)
        return (
            Attention.num_bytes(config, layer_config.attention, weight_format)
            + Linear.num_bytes(output_shape(config), weight_format)
            + mlp_bytes
            + len(norm_names(config)) * Norm.num_bytes(hidden_norm(config))
        )

    def slots(self) -> dict[str, WeightSlot]:
        slots = {**self.attention.slots(), **self.output.slots("output"), **self.mlp.slots()}
        for name, norm in self.norms.items():
            slots |= norm.slots(name)
        return slots

    def attend(
        self,
        attention_rows: AttentionRows,
        rows: StepRows,
        rope_rows: Sequence[Tensor],
        metadata: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
    ) -> None:
        """From `normed` (or `hidden`, where nothing is normed before attention) to `attention`."""
        x = rows.hidden if self.attention_norm is None else rows.normed
        self.attention.forward(attention_rows, x, rope_rows, metadata, kv_cache)

    def finish(self, rows: StepRows) -> None:
        """From `attention` and `hidden` to the next `hidden` and `normed`."""
        if self.has_post_norms:
            self._finish_with_post_norms(rows)
            return
        assert self.mlp_norm is not None
        if self.is_parallel:  # `hidden` is normed before attention is added to it
            self.mlp_norm.apply(rows.normed, rows.hidden)
        self.output.apply(self.namespace, rows.hidden, rows.attention, rows.onto_hidden)
        if not self.is_parallel:
            self.mlp_norm.apply(rows.normed, rows.hidden)
        self.mlp.forward(rows, rows.normed, rows.hidden, rows.onto_hidden)
        if self.next_norm is not None:
            self.next_norm.apply(rows.normed, rows.hidden)

    def _finish_with_post_norms(self, rows: StepRows) -> None:
        """Two buffers take turns."""
        self.output.apply(self.namespace, rows.scratch, rows.attention)
        self.norms["post_attention_norm"].apply(rows.normed, rows.scratch)
        mlp_input = self._add(rows.hidden, rows.normed, self.mlp_norm, rows.scratch)
        self.mlp.forward(rows, mlp_input, rows.normed)
        self.norms["post_mlp_norm"].apply(rows.scratch, rows.normed)
        self._add(rows.hidden, rows.scratch, self.next_norm, rows.normed)

    def _add(self, hidden: Tensor, x: Tensor, norm: Norm | None, normed: Tensor) -> Tensor:
        """hidden += x; returns what comes next: `normed`, now norm(hidden), or hidden itself where there is no norm."""
        if norm is None:
            add_rows(self.namespace, hidden, x)
            return hidden
        norm.add_apply(normed, hidden, x)
        return normed
