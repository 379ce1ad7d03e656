"""The products of a model's layers: what they cost, and copies of them with random weights to be timed alone.

Knows a ModelConfig, not a checkpoint: a benchmark of kernels needs the shapes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm.errors import NotSupportedError
from pagedllm.model.attention import qkv_shape
from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import vocabulary_shape, weight_bytes
from pagedllm.model.host_memory import HostMemory
from pagedllm.model.layers import output_shape
from pagedllm.model.linear import NO_EPILOGUE, Epilogue, Linear, LinearShape, PackedFormat
from pagedllm.model.mlp import mlp_shapes

COPIES_BYTES = (
    256 << 20
)  # of weights or keys a kernel is timed over, so that no cache holds them from one call to the next
MAX_NUM_COPIES = 64  # a toy's weights stay in the cache whatever one does


def layer_shapes(config: ModelConfig) -> dict[str, LinearShape]:
    """A layer's products, in order. Raises NotSupportedError for a mixture of experts."""
    if config.moe is not None:
        raise NotSupportedError(f"{config.architecture}: bench does not count the products of a mixture of experts yet")
    gate_up, down = mlp_shapes(config, config.intermediate_size)
    return {"qkv": qkv_shape(config), "output": output_shape(config), "gate_up": gate_up, "down": down}


def num_copies(num_bytes: int) -> int:
    """Of something of num_bytes that a real step would find in memory, not in a cache."""
    return max(1, min(MAX_NUM_COPIES, COPIES_BYTES // num_bytes))


def num_weights(shape: LinearShape) -> int:
    return shape.in_features * sum(shape.part_sizes)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token costs at least."""

    layer_weights: int  # of all layers' products
    head_weights: int
    weight_bytes: int  # all that is packed

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype) -> ModelCost:
        layer = sum(map(num_weights, layer_shapes(config).values()))
        head = num_weights(vocabulary_shape(config))
        return ModelCost(config.num_layers * layer, head, weight_bytes(config, PackedFormat(dtype)))

    def flops(self, num_computed_tokens: int, num_wanted_rows: int) -> float:
        """2 x weights of the layers a computed token + 2 x head a row whose logits are wanted; no attention."""
        return 2.0 * (num_computed_tokens * self.layer_weights + num_wanted_rows * self.head_weights)


class TimedLinear:
    """Copies of one product; `seconds` times a call, going through the copies."""

    def __init__(
        self,
        shape: LinearShape,
        epilogue: Epilogue,
        dtype: torch.dtype,
        namespace: str,
        copies: int,
        out: torch.dtype,
    ) -> None:
        """out: the type of the results; the LM head's are float32."""
        weight_format = PackedFormat(dtype)
        self._memory = HostMemory(copies * Linear.num_bytes(shape, weight_format))
        self._copies = [Linear(shape, weight_format, self._memory) for _ in range(copies)]
        self._copies[0].weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        for copy in self._copies[1:]:
            copy.weight.copy_(self._copies[0].weight)
        self.shape = shape
        self.weight_bytes = self._copies[0].weight.nbytes
        self._epilogue, self._dtype, self._namespace, self._out = epilogue, dtype, namespace, out

    def bytes(self, num_rows: int) -> int:
        """Weights once, rows in, rows out."""
        row = self.shape.in_features * self._dtype.itemsize + self.shape.out_features * self._out.itemsize
        return self.weight_bytes + num_rows * row

    def flops(self, num_rows: int) -> float:
        return 2.0 * num_rows * num_weights(self.shape)

    def seconds(self, num_rows: int, at_least: float) -> float:
        """Of one call at num_rows rows; see `time_rounds`."""
        x = torch.randn(num_rows, self.shape.in_features, generator=torch.Generator().manual_seed(1)).to(self._dtype)
        out = torch.empty(num_rows, self.shape.out_features, dtype=self._out, device="cpu")

        def run() -> None:
            for copy in self._copies:
                copy.apply(self._namespace, out, x, self._epilogue)

        return time_rounds(run, at_least) / len(self._copies)

    def close(self) -> None:
        self._memory.close()


def time_rounds(run: Callable[[], object], at_least: float) -> float:
    """Seconds of the fastest of several runs, at least three and `at_least` seconds of them, after one that warms up.

    The fastest: other programs can only make a run longer.
    """
    run()
    durations: list[float] = []
    while len(durations) < 3 or sum(durations) < at_least:
        begin = time.perf_counter()
        run()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def make_layer_linears(config: ModelConfig, dtype: torch.dtype, namespace: str) -> dict[str, TimedLinear]:
    """Each product of a layer, in `num_copies` copies."""
    linears = {}
    for name, shape in layer_shapes(config).items():
        epilogue = Epilogue(config.activation) if shape.is_gated else NO_EPILOGUE
        copies = num_copies(PackedFormat(dtype).num_bytes(shape))
        linears[name] = TimedLinear(shape, epilogue, dtype, namespace, copies, dtype)
    return linears


def make_head(config: ModelConfig, dtype: torch.dtype, namespace: str) -> TimedLinear:
    shape = vocabulary_shape(config)
    copies = num_copies(PackedFormat(dtype).num_bytes(shape))
    return TimedLinear(shape, NO_EPILOGUE, dtype, namespace, copies, torch.float32)


def linear_flops_rate(linears: dict[str, TimedLinear], num_rows: int, at_least: float) -> float:
    """FLOP/s over one layer's products at num_rows rows, each measured for `at_least` seconds."""
    seconds = sum(linear.seconds(num_rows, at_least) for linear in linears.values())
    return sum(linear.flops(num_rows) for linear in linears.values()) / seconds


def read_bandwidth(buffer: Tensor) -> float:
    """Bytes per second of the fastest of several reads of a buffer of integers, end to end, with torch's threads."""
    return buffer.nbytes / time_rounds(lambda: torch.amax(buffer), at_least=0.1)


def bandwidth_buffer() -> Tensor:
    """270 MB, several times any cache, in huge pages as the weights are; int64, which torch reads fastest."""
    num_elements = 270_000_000 // 8
    return HostMemory(num_elements * 8).take((num_elements,), torch.int64).fill_(1)
