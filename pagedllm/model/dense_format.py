"""Weights as a library's GEMM wants them, for CUDA's kernels: rows [N, K] of a 16-bit type, parts below each other.

Products are torch's, which are cuBLAS's on a GPU; a bias and a residual go into them. A gated pair is one product
[M, gate | up], rounded, then our gated activation. What a row of a product depends on is the library's business:
exactness rule (a) holds only where that one keeps it. Products of experts are our own, and keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.errors import NotSupportedError
from pagedllm.model.host_memory import Memory, aligned
from pagedllm.model.linear import Epilogue, LinearShape
from pagedllm.ops.linear import Activation, gated_activation, gather_rows
from pagedllm.ops.moe import grouped_dense

VECTOR_BYTES = 16  # rows of operands are whole vectors


class DenseFormat:
    """bfloat16 or float16. No padding: a size that is no multiple of 8 is refused when storage is allocated."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def tensor_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def num_bytes(self, shape: LinearShape, count: int = 1) -> int:
        num_rows = count * sum(shape.part_sizes)
        bias = aligned(num_rows * self.dtype.itemsize) if shape.has_bias else 0
        return aligned(num_rows * shape.in_features * self.dtype.itemsize) + bias

    def allocate(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        multiple = VECTOR_BYTES // self.dtype.itemsize
        if shape.in_features % multiple or (shape.is_gated and shape.out_features % multiple):
            raise NotSupportedError(
                f"a product of {shape.in_features} by {shape.out_features} is not supported by the CUDA kernels: "
                f"hidden_size and intermediate_size must be multiples of {multiple}"
            )
        return memory.take((*lead, sum(shape.part_sizes), shape.in_features), self.dtype)

    def load_part(self, weight: Tensor, shape: LinearShape, part: int, first_row: int, rows: Tensor) -> None:
        weight.split(shape.part_sizes)[part][first_row : first_row + len(rows)].copy_(rows)

    def allocate_bias(self, shape: LinearShape, memory: Memory, *lead: int) -> Tensor:
        return memory.take((*lead, sum(shape.part_sizes)), self.dtype)

    def load_bias_part(self, bias: Tensor, shape: LinearShape, part: int, values: Tensor) -> None:
        bias.split(shape.part_sizes)[part].copy_(values)

    def apply(
        self, namespace: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue
    ) -> None:
        if out.dtype != x.dtype:
            assert epilogue.residual is None
            _float_product(out, x, weight)
            if bias is not None:
                out.add_(bias)
        elif epilogue.activation:
            gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, 1)
            gated_activation(namespace, out, gate, up, epilogue.activation)
        elif epilogue.residual is not None:
            residual = epilogue.residual if bias is None else epilogue.residual + bias
            torch.addmm(residual, x, weight.T, out=out)
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out=out)

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
        grouped_dense(namespace, out, x, weights, biases, bounds, activation)

    def embed(self, namespace: str, out: Tensor, token_ids: Tensor, weight: Tensor, scale: float) -> None:
        gather_rows(namespace, out, weight, token_ids)
        if scale != 1:
            out.mul_(scale)


def _float_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out [M, N] float32: logits of the LM head and of routers are not rounded to 16 bits."""
    if x.is_cuda:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:  # emulation: torch has no such product on a CPU; float64 makes a row's bits its own
        out.copy_(x.double() @ weight.double().T)
