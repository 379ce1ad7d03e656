"""Weights in plain rows, for CUDA: what each epilogue gives, and what storage takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.errors import NotSupportedError
from pagedllm.model.dense_format import DenseFormat
from pagedllm.model.host_memory import HostMemory
from pagedllm.model.linear import Epilogue, Linear, LinearShape
from pagedllm.ops.linear import Activation

TWIN = "pagedllm_reference"
DTYPES = [torch.bfloat16, torch.float16]


def fill(shape: LinearShape, dtype: torch.dtype) -> tuple[Linear, Tensor, Tensor]:
    """A Linear, its weight [N, K] and its bias [N] (zeros where it has none), both float32."""
    weight_format = DenseFormat(dtype)
    memory = HostMemory(Linear.num_bytes(shape, weight_format))
    linear = Linear(shape, weight_format, memory)
    assert memory.num_taken == Linear.num_bytes(shape, weight_format)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(sum(shape.part_sizes), shape.in_features, generator=generator).to(dtype).float()
    bias = torch.randn(len(weight), generator=generator).to(dtype).float() * shape.has_bias
    for part, rows in enumerate(weight.split(shape.part_sizes)):
        linear.load_weight(part, rows)
        if shape.has_bias:
            linear.load_bias(part, bias.split(shape.part_sizes)[part])
    return linear, weight, bias


def apply(linear: Linear, x: Tensor, epilogue: Epilogue, out_dtype: torch.dtype) -> Tensor:
    out = torch.full((len(x), linear.shape.out_features), torch.nan, dtype=out_dtype)
    linear.apply(TWIN, out, x, epilogue)
    return out.float()


def rows(num_columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(5, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_parts_follow_each_other_with_bias_and_residual(dtype: torch.dtype, has_bias: bool, has_residual: bool) -> None:
    linear, weight, bias = fill(LinearShape(16, (24, 8, 3), has_bias=has_bias), dtype)
    x = rows(16, dtype)
    residual = rows(35, dtype) if has_residual else None
    found = apply(linear, x, Epilogue(residual=residual), dtype)
    expected = x.float() @ weight.T + bias + (0 if residual is None else residual.float())
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_a_residual_may_be_the_result() -> None:
    linear, weight, _ = fill(LinearShape(16, (24,)), torch.bfloat16)
    x, out = rows(16, torch.bfloat16), rows(24, torch.bfloat16)
    expected = x.float() @ weight.T + out.float()
    linear.apply(TWIN, out, x, Epilogue(residual=out))
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.04)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_pair_is_activated(dtype: torch.dtype, has_bias: bool) -> None:
    linear, weight, bias = fill(LinearShape(16, (24, 24), is_gated=True, has_bias=has_bias), dtype)
    x = rows(16, dtype)
    gate, up = (x.float() @ weight.T + bias).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    found = apply(linear, x, Epilogue(Activation.SILU), dtype)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_not_rounded_to_16_bits(dtype: torch.dtype, has_bias: bool) -> None:
    linear, weight, bias = fill(LinearShape(16, (40,), has_bias=has_bias), dtype)
    x = rows(16, dtype)
    found = apply(linear, x, Epilogue(), torch.float32)
    torch.testing.assert_close(found, x.float() @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_an_embedding_reads_rows_and_scales_them_once() -> None:
    linear, weight, _ = fill(LinearShape(16, (40,)), torch.bfloat16)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    linear.embed(TWIN, out, torch.tensor([39, 0, 7], dtype=torch.int32), 25.25)
    assert torch.equal(out, (weight[[39, 0, 7]] * 25.25).bfloat16())


@pytest.mark.parametrize("shape", [LinearShape(12, (24,)), LinearShape(16, (12, 12), is_gated=True)])
def test_sizes_that_are_no_whole_vectors_are_refused(shape: LinearShape) -> None:
    with pytest.raises(NotSupportedError, match=r"a product of \d+ by \d+ is not supported.*multiples of 8"):
        Linear(shape, DenseFormat(torch.float16), HostMemory(4096))
