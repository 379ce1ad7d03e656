"""One decoder layer: attention, and what follows on the rows that are still wanted.

A layer finds its normed input ready and leaves the next layer's ready, so that every norm stands beside the addition
before it. Additions without a norm between are epilogues of the products.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagedllm.model.attention import Attention
from pagedllm.model.buffers import AttentionRows, StepRows
from pagedllm.model.config import LayerConfig, ModelConfig
from pagedllm.model.host_memory import HostMemory
from pagedllm.model.linear import Epilogue, Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.model.norm import NormWeight
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata
from pagedllm.ops.norm import add_rms_norm, rms_norm


def linear_shapes(config: ModelConfig) -> tuple[LinearShape, LinearShape, LinearShape]:
    """Of the attention's output, gate and up, and down."""
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    return (
        LinearShape(config.num_q_heads * config.head_dim, (hidden_size,), has_bias=config.has_output_bias),
        LinearShape(hidden_size, (intermediate_size,) * 2, is_gated=True, has_bias=config.has_mlp_bias),
        LinearShape(intermediate_size, (hidden_size,), has_bias=config.has_mlp_bias),
    )


def norm_names(config: ModelConfig) -> tuple[str, ...]:
    names = ("attention_norm", "mlp_norm")
    return (*names, "post_attention_norm", "post_mlp_norm") if config.has_post_norms else names


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        layer_config: LayerConfig,
        weight_format: WeightFormat,
        memory: HostMemory,
        backend: AttentionBackend,
        namespace: str,
    ) -> None:
        self.namespace = namespace
        self.eps = config.norm_eps
        self.has_post_norms = config.has_post_norms
        self.attention = Attention(config, layer_config.attention, weight_format, memory, backend, namespace)
        self.output, self.gate_up, self.down = (Linear(shape, weight_format, memory) for shape in linear_shapes(config))
        self.gate = Epilogue(config.activation)
        self.norms = {
            name: NormWeight(config.hidden_size, config.norm_weight_offset, memory) for name in norm_names(config)
        }
        self.next_norm: Tensor = self.norms["attention_norm"].weight  # the decoder sets the next layer's, or its own

    @staticmethod
    def num_bytes(config: ModelConfig, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        linears = sum(Linear.num_bytes(shape, weight_format) for shape in linear_shapes(config))
        norms = len(norm_names(config)) * NormWeight.num_bytes(config.hidden_size)
        return Attention.num_bytes(config, weight_format) + linears + norms

    def slots(self) -> dict[str, WeightSlot]:
        return {
            **self.attention.slots(),
            **self.output.slots("output"),
            **self.gate_up.slots("gate", "up"),
            **self.down.slots("down"),
            **{f"{name}.weight": norm.slot() for name, norm in self.norms.items()},
        }

    def attend(
        self,
        rows: AttentionRows,
        normed: Tensor,
        rope_rows: Sequence[Tensor],
        metadata: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
    ) -> None:
        self.attention.forward(rows, normed, rope_rows, metadata, kv_cache)

    def finish(self, rows: StepRows) -> None:
        """From `attention` and `hidden` to the next `hidden` and `normed`."""
        if self.has_post_norms:
            self._finish_with_post_norms(rows)
            return
        namespace, eps = self.namespace, self.eps
        self.output.apply(namespace, rows.hidden, rows.attention, rows.onto_hidden)
        rms_norm(namespace, rows.normed, rows.hidden, self.norms["mlp_norm"].weight, eps)
        self.gate_up.apply(namespace, rows.intermediate, rows.normed, self.gate)
        self.down.apply(namespace, rows.hidden, rows.intermediate, rows.onto_hidden)
        rms_norm(namespace, rows.normed, rows.hidden, self.next_norm, eps)

    def _finish_with_post_norms(self, rows: StepRows) -> None:
        """hidden += norm(output(attention)); hidden += norm(mlp(norm(hidden))). Two buffers take turns."""
        namespace, eps, norms = self.namespace, self.eps, self.norms
        self.output.apply(namespace, rows.scratch, rows.attention)
        rms_norm(namespace, rows.normed, rows.scratch, norms["post_attention_norm"].weight, eps)
        add_rms_norm(namespace, rows.scratch, rows.hidden, rows.normed, norms["mlp_norm"].weight, eps)
        self.gate_up.apply(namespace, rows.intermediate, rows.scratch, self.gate)
        self.down.apply(namespace, rows.normed, rows.intermediate)
        rms_norm(namespace, rows.scratch, rows.normed, norms["post_mlp_norm"].weight, eps)
        add_rms_norm(namespace, rows.normed, rows.hidden, rows.scratch, self.next_norm, eps)
