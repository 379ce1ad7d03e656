"""Linear: a shape and a WeightFormat. Only a WeightFormat knows how weights are stored and multiplied.

Merged products (q, k, v; gate and up) are one Linear with several parts, so that a step multiplies once. Parts are
loaded one at a time into the packed storage and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagedllm.ops.linear import GATED_HALF, PANEL, Activation, packed_linear, packed_shape


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

    def columns(self, part: int) -> Tensor:
        """Stored column of each row of a part, int64 [part_sizes[part]]."""
        rows = torch.arange(self.part_sizes[part])
        if self.is_gated:
            return rows // GATED_HALF * PANEL + rows % GATED_HALF + part * GATED_HALF
        return rows + sum(self.part_sizes[:part])


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

    def allocate(self, shape: LinearShape) -> Tensor:
        """Storage for a Linear, zeroed: padding must be zero."""
        ...

    def load_part(self, weight: Tensor, shape: LinearShape, part: int, rows: Tensor) -> None:
        """Stores rows [part_sizes[part], in_features] of a part."""
        ...

    def apply(
        self, namespace: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue
    ) -> None:
        """out [M, out_features] = epilogue(x [M, in_features] @ weight.T + bias)."""
        ...


class PackedFormat:
    """Panels of 64 columns in bfloat16 or float32: `pagedllm.ops.linear` draws them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def tensor_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def allocate(self, shape: LinearShape) -> Tensor:
        return torch.zeros(packed_shape(shape.padded_columns, shape.in_features, self.dtype), dtype=self.dtype)

    def load_part(self, weight: Tensor, shape: LinearShape, part: int, rows: Tensor) -> None:
        columns = shape.columns(part)
        rows = rows.to(self.dtype)
        if self.dtype == torch.float32:
            by_column = weight.transpose(1, 2)  # [panels, 64, K], a view
        else:
            if shape.in_features % 2:
                rows = torch.nn.functional.pad(rows, (0, 1))
            # a pair along K is moved as one 32-bit word
            rows = rows.contiguous().view(torch.int32)
            by_column = weight.view(torch.int32)[..., 0].transpose(1, 2)  # [panels, 64, K/2], a view
        first, last = int(columns[0]), int(columns[-1]) + 1
        if not shape.is_gated and first % PANEL == 0 and last % PANEL == 0:
            by_column[first // PANEL : last // PANEL] = rows.unflatten(0, (-1, PANEL))
        else:
            by_column[columns // PANEL, columns % PANEL] = rows

    def apply(
        self, namespace: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue
    ) -> None:
        packed_linear(namespace, out, x, weight, bias, epilogue.residual, epilogue.activation)


class Linear:
    """y = x @ W.T + b, over one or more parts."""

    def __init__(self, shape: LinearShape, weight_format: WeightFormat) -> None:
        self.shape = shape
        self.format = weight_format
        self.weight = weight_format.allocate(shape)
        self.bias = torch.zeros(shape.padded_columns, dtype=torch.float32) if shape.has_bias else None

    def load_weight(self, part: int, rows: Tensor) -> None:
        """rows: [part_sizes[part], in_features], any floating type. Raises ValueError on another shape."""
        expected = (self.shape.part_sizes[part], self.shape.in_features)
        if tuple(rows.shape) != expected:
            raise ValueError(f"expected a weight of shape {expected}, got {tuple(rows.shape)}")
        self.format.load_part(self.weight, self.shape, part, rows)

    def load_bias(self, part: int, values: Tensor) -> None:
        """values: [part_sizes[part]], any floating type. Raises ValueError on another shape."""
        expected = (self.shape.part_sizes[part],)
        if self.bias is None or tuple(values.shape) != expected:
            raise ValueError(f"expected a bias of shape {expected}, got {tuple(values.shape)}")
        self.bias[self.shape.columns(part)] = values.float()

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
