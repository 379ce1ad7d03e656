"""Mixture of experts: each token passes the MLPs that a router chooses for it, and their results are added by weight.

Exact under batching: the router looks at one row; an expert's product of a row depends on that row alone, whatever
others stand beside it; a row's results are added in the order of the experts. `pagedllm.ops.moe` draws the rows.

    x -- router --> experts and weights of each token
    x rows of expert 0 | rows of expert 1 | ...   --gate, up, down--> the same order --by token--> sum of weight * row

Letters: T tokens, E experts, k experts a token, H hidden_size.
"""

from __future__ import annotations

from torch import Tensor

from pagedllm.model.buffers import MoeBuffers, StepRows
from pagedllm.model.config import ModelConfig, MoeConfig
from pagedllm.model.host_memory import Memory
from pagedllm.model.linear import NO_EPILOGUE, Epilogue, GroupedLinear, Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.model.mlp import MLP, mlp_shapes
from pagedllm.ops.linear import Activation, gather_rows
from pagedllm.ops.moe import combine_experts, route_tokens


def router_shape(config: ModelConfig, moe: MoeConfig) -> LinearShape:
    return LinearShape(config.hidden_size, (moe.num_experts,), has_bias=moe.has_router_bias)


def shared_gate_shape(config: ModelConfig) -> LinearShape:
    return LinearShape(config.hidden_size, (1,))


class MoE:
    def __init__(self, config: ModelConfig, weight_format: WeightFormat, memory: Memory, namespace: str) -> None:
        assert config.moe is not None
        assert config.has_gated_mlp
        self.moe = moe = config.moe
        self.namespace = namespace
        self.activation = config.activation
        self.router = Linear(router_shape(config, moe), weight_format, memory)
        self.up, self.down = (
            GroupedLinear(shape, moe.num_experts, weight_format, memory)
            for shape in mlp_shapes(config, moe.intermediate_size)
        )
        self.shared: MLP | None = None
        if moe.shared_intermediate_size:
            self.shared = MLP(config, moe.shared_intermediate_size, weight_format, memory, namespace)
            self.shared_gate = Linear(shared_gate_shape(config), weight_format, memory)

    @staticmethod
    def num_bytes(config: ModelConfig, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        assert config.moe is not None
        moe = config.moe
        shared = 0
        if moe.shared_intermediate_size:
            shared = MLP.num_bytes(config, moe.shared_intermediate_size, weight_format)
            shared += Linear.num_bytes(shared_gate_shape(config), weight_format)
        shapes = mlp_shapes(config, moe.intermediate_size)
        experts = sum(weight_format.num_bytes(shape, moe.num_experts) for shape in shapes)
        return Linear.num_bytes(router_shape(config, moe), weight_format) + experts + shared

    def slots(self) -> dict[str, WeightSlot]:
        slots = self.router.slots("router")
        for index, (up, down) in enumerate(zip(self.up.parts, self.down.parts, strict=True)):
            expert = {**up.slots("gate", "up"), **down.slots("down")}
            slots |= {f"experts.{index}.{name}": slot for name, slot in expert.items()}
        if self.shared is not None:
            slots |= {f"shared.{name}": slot for name, slot in self.shared.slots().items()}
            slots |= self.shared_gate.slots("shared_gate")
        return slots

    def forward(self, rows: StepRows, x: Tensor, out: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        """out = epilogue(moe(x)), both [T, H]; rows.moe is overwritten."""
        assert rows.moe is not None
        buffers = rows.moe.of_rows(len(x))
        self.router.apply(self.namespace, buffers.router_logits, x)
        route_tokens(
            self.namespace, buffers.weights, buffers.places, buffers.tokens, buffers.bounds, buffers.router_logits,
            self.moe.is_normalized,
        )  # fmt: skip
        gather_rows(self.namespace, buffers.gathered, x, buffers.tokens)
        self.up.apply(self.namespace, buffers.intermediate, buffers.gathered, buffers.bounds, self.activation)
        self.down.apply(self.namespace, buffers.gathered, buffers.intermediate, buffers.bounds, Activation.NONE)
        shared, shared_gates = self._shared_result(buffers, x)
        combine_experts(
            self.namespace, out, buffers.gathered, buffers.places, buffers.weights, shared, shared_gates,
            epilogue.residual,
        )  # fmt: skip

    def _shared_result(self, buffers: MoeBuffers, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What all tokens' expert gives, [T, H], and the logits of its share, [T, 1]."""
        if self.shared is None:
            return None, None
        self.shared.run(buffers.shared_intermediate, x, buffers.shared)
        self.shared_gate.apply(self.namespace, buffers.shared_gates, x)
        return buffers.shared, buffers.shared_gates
