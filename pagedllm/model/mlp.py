"""The MLP of a layer: down(act(gate(x)) * up(x)), or down(act(up(x))) where there is no gate."""

from __future__ import annotations

from torch import Tensor

from pagedllm.model.buffers import StepRows
from pagedllm.model.config import ModelConfig
from pagedllm.model.host_memory import Memory
from pagedllm.model.linear import NO_EPILOGUE, Epilogue, Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.ops.linear import ungated_activation


def mlp_shapes(config: ModelConfig, intermediate_size: int) -> tuple[LinearShape, LinearShape]:
    """Of gate and up (up alone where there is no gate), and of down."""
    hidden_size, has_bias = config.hidden_size, config.has_mlp_bias
    num_parts = 2 if config.has_gated_mlp else 1
    return (
        LinearShape(hidden_size, (intermediate_size,) * num_parts, is_gated=config.has_gated_mlp, has_bias=has_bias),
        LinearShape(intermediate_size, (hidden_size,), has_bias=has_bias),
    )


class MLP:
    def __init__(
        self,
        config: ModelConfig,
        intermediate_size: int,
        weight_format: WeightFormat,
        memory: Memory,
        namespace: str,
    ) -> None:
        self.namespace = namespace
        self.activation = config.activation
        self.is_gated = config.has_gated_mlp
        self.up, self.down = (Linear(shape, weight_format, memory) for shape in mlp_shapes(config, intermediate_size))
        self.gate = Epilogue(config.activation) if self.is_gated else NO_EPILOGUE

    @staticmethod
    def num_bytes(config: ModelConfig, intermediate_size: int, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        return sum(Linear.num_bytes(shape, weight_format) for shape in mlp_shapes(config, intermediate_size))

    def slots(self) -> dict[str, WeightSlot]:
        return {**self.up.slots(*(("gate", "up") if self.is_gated else ("up",))), **self.down.slots("down")}

    def forward(self, rows: StepRows, x: Tensor, out: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        """out = epilogue(mlp(x)), both [T, H]; rows.intermediate is overwritten."""
        self.run(rows.intermediate, x, out, epilogue)

    def run(self, intermediate: Tensor, x: Tensor, out: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        """out = epilogue(mlp(x)), both [M, H]; intermediate [M, I] is overwritten."""
        self.up.apply(self.namespace, intermediate, x, self.gate)
        if not self.is_gated:
            ungated_activation(self.namespace, intermediate, intermediate, self.activation)
        self.down.apply(self.namespace, out, intermediate, epilogue)
