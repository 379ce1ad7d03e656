"""Linear: a shape and a WeightFormat. Only a WeightFormat knows how weights are stored and multiplied.

Merged products (q, k, v; gate and up) are one Linear with several parts, so that a step multiplies once. Parts are
loaded one at a time into the packed storage and dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagedllm.model.host_memory import Memory, aligned
from pagedllm.ops.linear import GATED_HALF, PANEL, Activation, embedding, packed_argmax, packed_linear, packed_shape
from pagedllm.ops.moe import grouped_linear


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Something that one tensor of a checkpoint fills."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]  # takes a tensor of that shape and any floating type, and copies it
    load_rows: Callable[[int, Tensor], None] | None = None  # some rows, the first one's number before them


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a part that fill the same columns of consecutive panels."""

    rows: slice
    panels: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.panels.stop - self.panels.start, self.columns.stop - self.columns.start


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A product of in_features by one or more parts: rows of q, k and v, say; two equal parts where gated."""

    in_features: int
    part_sizes: tuple[int, ...]
    is_gated: bool = False
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        """Columns of the result, without padding."""
        return self.part_sizes[0] if self.is_gated else sum(self.part_sizes)

    @property
    def padded_columns(self) -> int:
        """Columns of the stored weight, padding included."""
        if self.is_gated:
            return -(-self.part_sizes[0] // GATED_HALF) * PANEL
        return -(-sum(self.part_sizes) // PANEL) * PANEL

    def blocks(self, part: int, first_row: int, num_rows: int) -> Iterator[Block]:
        """Where `num_rows` rows of a part lie: 32 columns of every panel where gated, else one run of columns."""
        row = 0
        width = GATED_HALF if self.is_gated else PANEL
        column = first_row if self.is_gated else sum(self.part_sizes[:part]) + first_row
        left = part * GATED_HALF if self.is_gated else 0  # of the part's columns within a panel
        while row < num_rows:
            panel, offset = divmod(column + row, width)
            if offset == 0 and num_rows - row >= width:
                num_panels, num_columns = (num_rows - row) // width, width
            else:
                num_panels, num_columns = 1, min(width - offset, num_rows - row)
            end = row + num_panels * num_columns
            yield Block(
                slice(row, end), slice(panel, panel + num_panels), slice(left + offset, left + offset + num_columns)
            )
            row = end


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a product before it is rounded and stored."""

    activation: Activation = Activation.NONE  # of a gated Linear
    residual: Tensor | None = None  # [M, out_features], added last; may be `out`


NO_EPILOGUE = Epilogue()


class WeightFormat(Protocol):
    """How the weights of a Linear are stored and multiplied. A new format (int8, a library's GEMM) is a class."""

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """The checkpoint's tensors behind the weight `name`: one here; values and scales in a quantized format."""
        ...

    def num_bytes(self, shape: LinearShape, count: int = 1) -> int:
        """What `allocate` and `allocate_bias` take for `count` weights and, where there are any, biases."""
        ...

    def allocate(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        """Storage for a Linear, zeroed: padding must be zero. `lead`: dimensions before those of one weight."""
        ...

    def load_part(self, weight: Tensor, shape: LinearShape, part: int, first_row: int, rows: Tensor) -> None:
        """Stores rows [num_rows, in_features] of a part, first_row and those after it."""
        ...

    def allocate_bias(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        """Storage for a bias, zeroed, in the order of the weight's columns."""
        ...

    def load_bias_part(self, bias: Tensor, shape: LinearShape, part: int, values: Tensor) -> None:
        """Stores values [part_sizes[part]] of a part."""
        ...

    def apply(
        self, namespace: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue
    ) -> None:
        """out [M, out_features] = epilogue(x [M, in_features] @ weight.T + bias)."""
        ...

    def apply_grouped(
        self,
        namespace: str,
        out: Tensor,
        x: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        bounds: Tensor,
        activation: Activation,
    ) -> None:
        """The same of runs of rows, run i with weight i: rows bounds[i] .. bounds[i + 1] - 1."""
        ...

    def embed(self, namespace: str, out: Tensor, token_ids: Tensor, weight: Tensor, scale: float) -> None:
        """out [M, in_features] = rows token_ids [M] int32 of the weight, times scale."""
        ...


class PackedFormat:
    """Panels of 64 columns in bfloat16 or float32: `pagedllm.ops.linear` draws them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def tensor_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def num_bytes(self, shape: LinearShape, count: int = 1) -> int:
        elements = count * math.prod(packed_shape(shape.padded_columns, shape.in_features, self.dtype))
        bias_elements = count * shape.padded_columns if shape.has_bias else 0
        return aligned(elements * self.dtype.itemsize) + aligned(bias_elements * torch.float32.itemsize)

    def allocate(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        return memory.take((*lead, *packed_shape(shape.padded_columns, shape.in_features, self.dtype)), self.dtype)

    def load_part(self, weight: Tensor, shape: LinearShape, part: int, first_row: int, rows: Tensor) -> None:
        rows = rows.to(self.dtype)
        if self.dtype == torch.float32:
            by_column = weight.transpose(1, 2)  # [panels, 64, K], a view
        else:
            if shape.in_features % 2:
                rows = torch.nn.functional.pad(rows, (0, 1))
            # a pair along K is moved as one 32-bit word; a view of a file may begin at an odd element
            rows = rows.clone() if rows.storage_offset() % 2 else rows.contiguous()
            rows = rows.view(torch.int32)
            by_column = weight.view(torch.int32)[..., 0].transpose(1, 2)  # [panels, 64, K/2], a view
        for block in shape.blocks(part, first_row, len(rows)):
            by_column[block.panels, block.columns] = rows[block.rows].unflatten(0, block.shape)

    def allocate_bias(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        return memory.take((*lead, shape.padded_columns), torch.float32)

    def load_bias_part(self, bias: Tensor, shape: LinearShape, part: int, values: Tensor) -> None:
        by_panel = bias.view(-1, PANEL)
        for block in shape.blocks(part, 0, len(values)):
            by_panel[block.panels, block.columns] = values[block.rows].float().unflatten(0, block.shape)

    def apply(
        self, namespace: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue
    ) -> None:
        packed_linear(namespace, out, x, weight, bias, epilogue.residual, epilogue.activation)

    def argmax(self, namespace: str, out: Tensor, x: Tensor, linear: Linear, scale: float, softcap: float) -> None:
        """out [M] int32: the column of the largest of x @ weight.T, scaled and capped; see `packed_argmax`."""
        assert linear.bias is None
        packed_argmax(namespace, out, x, linear.weight, linear.shape.out_features, scale, softcap)

    def apply_grouped(
        self,
        namespace: str,
        out: Tensor,
        x: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        bounds: Tensor,
        activation: Activation,
    ) -> None:
        grouped_linear(namespace, out, x, weights, biases, bounds, activation)

    def embed(self, namespace: str, out: Tensor, token_ids: Tensor, weight: Tensor, scale: float) -> None:
        embedding(namespace, out, token_ids, weight, scale)


class Linear:
    """y = x @ W.T + b, over one or more parts."""

    def __init__(self, shape: LinearShape, weight_format: WeightFormat, memory: Memory) -> None:
        self.shape = shape
        self.format = weight_format
        self.weight = weight_format.allocate(shape, memory)
        self.bias = weight_format.allocate_bias(shape, memory) if shape.has_bias else None

    @classmethod
    def over(cls, shape: LinearShape, weight_format: WeightFormat, weight: Tensor, bias: Tensor | None) -> Linear:
        """One whose storage is another's."""
        linear = cls.__new__(cls)
        linear.shape, linear.format, linear.weight, linear.bias = shape, weight_format, weight, bias
        return linear

    @staticmethod
    def num_bytes(shape: LinearShape, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        return weight_format.num_bytes(shape)

    def slots(self, *part_names: str) -> dict[str, WeightSlot]:
        """ "q.weight", "q.bias" and so on, one name a part."""
        slots = {}
        for part, (name, size) in enumerate(zip(part_names, self.shape.part_sizes, strict=True)):
            weight_shape = (size, self.shape.in_features)
            slots[f"{name}.weight"] = WeightSlot(
                weight_shape, functools.partial(self.load_weight, part), functools.partial(self.load_rows, part)
            )
            if self.shape.has_bias:
                slots[f"{name}.bias"] = WeightSlot((size,), functools.partial(self.load_bias, part))
        return slots

    def load_weight(self, part: int, rows: Tensor) -> None:
        """rows: [part_sizes[part], in_features], any floating type. Raises ValueError on another shape."""
        expected = (self.shape.part_sizes[part], self.shape.in_features)
        if tuple(rows.shape) != expected:
            raise ValueError(f"expected a weight of shape {expected}, got {tuple(rows.shape)}")
        self.load_rows(part, 0, rows)

    def load_rows(self, part: int, first_row: int, rows: Tensor) -> None:
        """rows: some of a part, [num_rows, in_features], any floating type."""
        assert first_row + len(rows) <= self.shape.part_sizes[part]
        self.format.load_part(self.weight, self.shape, part, first_row, rows)

    def load_bias(self, part: int, values: Tensor) -> None:
        """values: [part_sizes[part]], any floating type. Raises ValueError on another shape."""
        expected = (self.shape.part_sizes[part],)
        if self.bias is None or tuple(values.shape) != expected:
            raise ValueError(f"expected a bias of shape {expected}, got {tuple(values.shape)}")
        self.format.load_bias_part(self.bias, self.shape, part, values)

    def apply(
        self,
        namespace: str,
        out: Tensor,
        x: Tensor,
        epilogue: Epilogue = NO_EPILOGUE,
        adapters: Sequence[object] | None = None,
    ) -> None:
        """out [M, out_features] of x's type or float32; x [M, in_features]; `adapters` is for LoRA, later."""
        assert adapters is None
        self.format.apply(namespace, out, x, self.weight, self.bias, epilogue)

    def embed(self, namespace: str, out: Tensor, token_ids: Tensor, scale: float) -> None:
        """out [M, in_features] = rows token_ids [M] int32 of the weight, times scale: an embedding is a Linear."""
        self.format.embed(namespace, out, token_ids, self.weight, scale)


class GroupedLinear:
    """`count` Linears of one shape, stored one after the other: each run of rows has its own."""

    def __init__(self, shape: LinearShape, count: int, weight_format: WeightFormat, memory: Memory) -> None:
        self.format = weight_format
        self.weights = weight_format.allocate(shape, memory, count)
        self.biases = weight_format.allocate_bias(shape, memory, count) if shape.has_bias else None
        biases = [None] * count if self.biases is None else list(self.biases)
        self.parts = [
            Linear.over(shape, weight_format, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)
        ]

    def apply(self, namespace: str, out: Tensor, x: Tensor, bounds: Tensor, activation: Activation) -> None:
        """Rows bounds[i] .. bounds[i + 1] - 1 of out = act(x @ weight_i.T + bias_i); bounds: [count + 1] int32."""
        self.format.apply_grouped(namespace, out, x, self.weights, self.biases, bounds, activation)
