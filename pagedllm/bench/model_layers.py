"""The products of a model's layers: what they cost, and copies of them with random weights to be timed alone.

Knows a ModelConfig, not a checkpoint: a benchmark of kernels needs the shapes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm.model.attention import qkv_shape
from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import vocabulary_shape, weight_bytes
from pagedllm.model.host_memory import HostMemory
from pagedllm.model.layers import output_shape
from pagedllm.model.linear import Epilogue, GroupedLinear, Linear, LinearShape, PackedFormat
from pagedllm.model.mlp import mlp_shapes
from pagedllm.model.moe import router_shape, shared_gate_shape
from pagedllm.ops.linear import Activation

# of weights or keys that a kernel is timed over, so that no cache holds them from one call to the next
COPIES_BYTES = 256 << 20
MAX_NUM_COPIES = 64  # a toy's weights stay in the cache whatever one does


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """A product that `num_layers` of a model have; of experts `num_experts` each, of which a token passes some."""

    shape: LinearShape
    num_layers: int
    num_experts: int = 1
    num_chosen: int = 1

    @property
    def num_weights(self) -> int:
        """Of one expert."""
        return self.shape.in_features * sum(self.shape.part_sizes)

    def num_bytes(self, weight_format: PackedFormat) -> int:
        """In one layer."""
        return weight_format.num_bytes(self.shape, self.num_experts)


def layer_products(config: ModelConfig) -> dict[str, LayerProduct]:
    """In the order in which a layer computes them."""
    num_layers, num_sparse = config.num_layers, sum(layer.is_sparse for layer in config.layers)
    products = {
        "qkv": LayerProduct(qkv_shape(config), num_layers),
        "output": LayerProduct(output_shape(config), num_layers),
    }
    if num_sparse < num_layers:
        gate_up, down = mlp_shapes(config, config.intermediate_size)
        products["gate_up"] = LayerProduct(gate_up, num_layers - num_sparse)
        products["down"] = LayerProduct(down, num_layers - num_sparse)
    if config.moe is not None:
        moe = config.moe
        gate_up, down = mlp_shapes(config, moe.intermediate_size)
        products["router"] = LayerProduct(router_shape(config, moe), num_sparse)
        counts = moe.num_experts, moe.num_experts_per_token
        products["expert_gate_up"] = LayerProduct(gate_up, num_sparse, *counts)
        products["expert_down"] = LayerProduct(down, num_sparse, *counts)
        if moe.shared_intermediate_size:
            gate_up, down = mlp_shapes(config, moe.shared_intermediate_size)
            products["shared_gate_up"] = LayerProduct(gate_up, num_sparse)
            products["shared_down"] = LayerProduct(down, num_sparse)
            products["shared_gate"] = LayerProduct(shared_gate_shape(config), num_sparse)
    return products


def head_product(config: ModelConfig) -> LayerProduct:
    return LayerProduct(vocabulary_shape(config), 1)


def num_copies(num_bytes: int) -> int:
    """Of something of num_bytes that a real step would find in memory, not in a cache."""
    return max(1, min(MAX_NUM_COPIES, COPIES_BYTES // num_bytes))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token costs at least."""

    layer_weights: int  # that it is multiplied with in all layers: of the experts those that it passes
    head_weights: int
    weight_bytes: int  # packed ones that it reads: all but the other experts, and but an embedding of its own

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype) -> ModelCost:
        weight_format, head = PackedFormat(dtype), head_product(config)
        read = weight_bytes(config, weight_format)
        if not config.is_tied:
            read -= head.num_bytes(weight_format)
        products = layer_products(config).values()
        for product in products:
            unread = product.num_experts - product.num_chosen
            read -= product.num_layers * product.num_bytes(weight_format) * unread // product.num_experts
        layer_weights = sum(product.num_layers * product.num_chosen * product.num_weights for product in products)
        return ModelCost(layer_weights, head.num_weights, read)

    def flops(self, num_computed_tokens: int, num_wanted_rows: int) -> float:
        """2 x weights of the layers a computed token + 2 x head a row whose logits are wanted; no attention."""
        return 2.0 * (num_computed_tokens * self.layer_weights + num_wanted_rows * self.head_weights)


class TimedLinear:
    """Copies of one product with random weights; `seconds` times a call, going through the copies.

    Experts are chosen evenly: as many rows pass each, or, where rows are few, one, and other experts with each call.
    """

    def __init__(
        self,
        product: LayerProduct,
        activation: Activation,
        dtype: torch.dtype,
        namespace: str,
        out: torch.dtype,
    ) -> None:
        """out: the type of the results; those of the LM head and of a router are float32."""
        weight_format = PackedFormat(dtype)
        self.product = product
        self.weight_bytes = product.num_bytes(weight_format)
        copies = num_copies(self.weight_bytes)
        self._memory = HostMemory(copies * self.weight_bytes)
        self._copies = [self._copy(weight_format) for _ in range(copies)]
        weights = [copy.weights if isinstance(copy, GroupedLinear) else copy.weight for copy in self._copies]
        weights[0].normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        for weight in weights[1:]:
            weight.copy_(weights[0])
        self._activation, self._dtype, self._namespace, self._out = activation, dtype, namespace, out

    def _copy(self, weight_format: PackedFormat) -> Linear | GroupedLinear:
        if self.product.num_experts == 1:
            return Linear(self.product.shape, weight_format, self._memory)
        return GroupedLinear(self.product.shape, self.product.num_experts, weight_format, self._memory)

    def bytes(self, num_tokens: int) -> int:
        """Weights once, of experts those that are chosen; rows in, rows out."""
        shape, num_rows = self.product.shape, num_tokens * self.product.num_chosen
        row = shape.in_features * self._dtype.itemsize + shape.out_features * self._out.itemsize
        num_read = min(num_rows, self.product.num_experts)
        return self.weight_bytes * num_read // self.product.num_experts + num_rows * row

    def flops(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * self.product.num_chosen * self.product.num_weights

    def seconds(self, num_tokens: int, at_least: float) -> float:
        """Of one call for num_tokens tokens; see `time_rounds`."""
        num_rows, shape = num_tokens * self.product.num_chosen, self.product.shape
        x = torch.randn(num_rows, shape.in_features, generator=torch.Generator().manual_seed(1)).to(self._dtype)
        out = torch.empty(num_rows, shape.out_features, dtype=self._out, device="cpu")
        choices, epilogue = expert_choices(num_rows, self.product.num_experts), Epilogue(self._activation)

        def run() -> None:
            for copy in self._copies:
                for bounds in choices:
                    if isinstance(copy, GroupedLinear):
                        copy.apply(self._namespace, out, x, bounds, self._activation)
                    else:
                        copy.apply(self._namespace, out, x, epilogue)

        return time_rounds(run, at_least) / len(self._copies) / len(choices)

    def close(self) -> None:
        self._memory.close()


def expert_choices(num_rows: int, num_experts: int) -> list[Tensor]:
    """Bounds [num_experts + 1] int32 of even choices; where not all experts have a row, of as many disjoint ones."""
    experts = torch.arange(num_experts + 1)
    if num_rows >= num_experts:
        return [(experts * num_rows // num_experts).to(torch.int32)]
    first_experts = range(0, num_experts - num_rows + 1, num_rows)
    return [(experts - first).clamp(0, num_rows).to(torch.int32) for first in first_experts]


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
    for name, product in layer_products(config).items():
        activation = config.activation if product.shape.is_gated else Activation.NONE
        out = torch.float32 if name == "router" else dtype
        linears[name] = TimedLinear(product, activation, dtype, namespace, out)
    return linears


def make_head(config: ModelConfig, dtype: torch.dtype, namespace: str) -> TimedLinear:
    return TimedLinear(head_product(config), Activation.NONE, dtype, namespace, torch.float32)


def linear_flops_rate(linears: dict[str, TimedLinear], num_tokens: int, at_least: float) -> float:
    """FLOP/s over all layers' products for num_tokens tokens, each measured for `at_least` seconds."""
    seconds = flops = 0.0
    for linear in linears.values():
        seconds += linear.product.num_layers * linear.seconds(num_tokens, at_least)
        flops += linear.product.num_layers * linear.flops(num_tokens)
    return flops / seconds


def read_bandwidth(buffer: Tensor) -> float:
    """Bytes per second of the fastest of several reads of a buffer of integers, end to end, with torch's threads."""
    return buffer.nbytes / time_rounds(lambda: torch.amax(buffer), at_least=0.1)


def bandwidth_buffer() -> Tensor:
    """270 MB, several times any cache, in huge pages as the weights are; int64, which torch reads fastest."""
    num_elements = 270_000_000 // 8
    return HostMemory(num_elements * 8).take((num_elements,), torch.int64).fill_(1)
