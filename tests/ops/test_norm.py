"""rms_norm, add_rms_norm and layer_norm: right within PyTorch's own error, and rows are independent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.library import load_kernels
from pagedllm.ops.norm import add_rms_norm, layer_norm, layer_norm_heads, rms_norm
from tests.ops.test_linear import rms

NAMESPACE = load_kernels().namespace
DTYPES = (torch.bfloat16, torch.float32)
EPS = 1e-5


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def inputs(num_rows: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hidden_size)
    x, residual = (3 * torch.randn(num_rows, hidden_size, generator=generator).to(dtype) for _ in range(2))
    return x, residual, torch.randn(hidden_size, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 15, 16, 17, 64, 100, 576, 1025])
def test_error_is_at_most_twice_torchs_own(dtype: torch.dtype, hidden_size: int) -> None:
    x, residual, weight = inputs(9, hidden_size, dtype)
    out, torchs = torch.empty_like(x), torch.empty_like(x)
    rms_norm(NAMESPACE, out, x, weight, EPS)
    rms_norm("pagedllm_reference", torchs, x, weight, EPS)
    exact = exact_norm(x, weight)
    half_a_step = rms(exact) * torch.finfo(dtype).eps / 2  # where torch happens to be exact
    assert rms(out - exact) <= max(2 * rms(torchs - exact), half_a_step)

    total = residual.clone()
    add_rms_norm(NAMESPACE, out, total, x, weight, EPS)
    assert torch.equal(total, residual + x)  # one addition, rounded once: nothing to differ in
    exact = exact_norm(total, weight)
    add_rms_norm("pagedllm_reference", torchs, residual, x, weight, EPS)
    assert rms(out - exact) <= max(2 * rms(torchs - exact), half_a_step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_on_that_row_alone(dtype: torch.dtype) -> None:
    x, _, weight = inputs(300, 577, dtype)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    rms_norm(NAMESPACE, together, x, weight, EPS)
    for row in range(300):
        rms_norm(NAMESPACE, alone[row : row + 1], x[row : row + 1], weight, EPS)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_leave_what_lies_between_them(dtype: torch.dtype) -> None:
    x, residual, weight = inputs(5, 40, dtype)
    wide = [torch.full((5, 64), torch.nan, dtype=dtype) for _ in range(3)]
    for buffer, values in zip(wide[1:], (x, residual), strict=True):
        buffer[:, :40] = values
    wide_out, wide_x, wide_residual = (buffer[:, :40] for buffer in wide)
    add_rms_norm(NAMESPACE, wide_out, wide_residual, wide_x, weight, EPS)
    out = torch.empty_like(x)
    add_rms_norm(NAMESPACE, out, residual, x, weight, EPS)
    assert torch.equal(wide_out, out)
    assert torch.equal(wide_residual, residual)
    assert all(buffer[:, 40:].isnan().all() for buffer in wide)


def test_output_may_be_the_input() -> None:
    x, _, weight = inputs(4, 70, torch.float32)
    expected = torch.empty_like(x)
    rms_norm(NAMESPACE, expected, x, weight, EPS)
    rms_norm(NAMESPACE, x, x, weight, EPS)
    assert torch.equal(x, expected)


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 15, 16, 17, 64, 100, 576, 1025])
def test_error_of_layer_norm_is_at_most_twice_torchs_own(
    hidden_size: int, dtype: torch.dtype, mean: float, has_bias: bool
) -> None:
    x, _, weight = inputs(9, hidden_size, dtype)
    x = (x.float() + mean).to(dtype)
    bias = torch.linspace(-1, 1, hidden_size) if has_bias else None
    out = torch.empty_like(x)
    layer_norm(NAMESPACE, out, x, weight, bias, EPS)
    exact = exact_layer_norm(x, weight, bias)
    torchs = torch.nn.functional.layer_norm(x.float(), (hidden_size,), weight, bias, EPS).to(dtype)
    half_a_step = rms(exact) * torch.finfo(dtype).eps / 2  # where torch happens to be exact
    assert rms(out - exact) <= max(2 * rms(torchs - exact), half_a_step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_of_layer_norm_depend_on_that_row_alone(dtype: torch.dtype) -> None:
    x, _, weight = inputs(300, 577, dtype)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    layer_norm(NAMESPACE, together, x, weight, weight, EPS)
    for row in range(300):
        layer_norm(NAMESPACE, alone[row : row + 1], x[row : row + 1], weight, weight, EPS)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_strided_rows_in_place_leaves_what_lies_between_them(dtype: torch.dtype) -> None:
    x, _, weight = inputs(5, 40, dtype)
    wide = torch.full((5, 64), torch.nan, dtype=dtype)
    wide[:, :40] = x
    layer_norm(NAMESPACE, wide[:, :40], wide[:, :40], weight, None, EPS)
    out = torch.empty_like(x)
    layer_norm(NAMESPACE, out, x, weight, None, EPS)
    assert torch.equal(wide[:, :40], out)
    assert wide[:, 40:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 50])
def test_layer_norm_of_heads_is_that_of_each_head_alone(head_dim: int, dtype: torch.dtype) -> None:
    x, _, _ = inputs(7, 5 * head_dim + 8, dtype)
    weight = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(1))
    wide = x.clone()
    layer_norm_heads(NAMESPACE, wide[:, 4 : 4 + 5 * head_dim], wide[:, 4 : 4 + 5 * head_dim], weight, EPS)
    for head in range(5):
        columns = slice(4 + head * head_dim, 4 + (head + 1) * head_dim)
        expected = torch.empty(7, head_dim, dtype=dtype)
        layer_norm(NAMESPACE, expected, x[:, columns], weight[head], None, EPS)
        assert torch.equal(wide[:, columns], expected)
    assert torch.equal(wide[:, :4], x[:, :4])
    assert torch.equal(wide[:, -4:], x[:, -4:])
    twin = torch.empty(7, 5 * head_dim, dtype=dtype)
    layer_norm_heads.reference(twin, x[:, 4 : 4 + 5 * head_dim], weight, EPS)
    torch.testing.assert_close(
        wide[:, 4 : 4 + 5 * head_dim], twin, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_opcheck() -> None:
    x, residual, weight = inputs(3, 20, torch.float32)
    torch.library.opcheck(torch.ops.pagedllm.rms_norm.default, (torch.empty_like(x), x, weight, EPS))
    torch.library.opcheck(torch.ops.pagedllm.add_rms_norm.default, (torch.empty_like(x), residual, x, weight, EPS))
    torch.library.opcheck(torch.ops.pagedllm.layer_norm.default, (torch.empty_like(x), x, weight, weight, EPS))
    heads = weight.view(4, 5)
    torch.library.opcheck(torch.ops.pagedllm.layer_norm_heads.default, (torch.empty_like(x), x, heads, EPS))


def test_wrong_arguments_are_named() -> None:
    x, _, weight = inputs(3, 20, torch.float32)
    with pytest.raises(RuntimeError, match=r"layer_norm_heads: x must have shape \[3, 18\], got float32 of shape"):
        layer_norm_heads(NAMESPACE, torch.empty_like(x), x, weight[:18].view(3, 6), EPS)
    with pytest.raises(RuntimeError, match=r"rms_norm: weight must have shape \[20\], got float32 of shape \[19\]"):
        rms_norm(NAMESPACE, torch.empty_like(x), x, weight[:19], EPS)
    with pytest.raises(RuntimeError, match="rms_norm: weight must be float32, got bfloat16"):
        rms_norm(NAMESPACE, torch.empty_like(x), x, weight.bfloat16(), EPS)
    with pytest.raises(RuntimeError, match="rms_norm: x must be bfloat16 or float32, got float64"):
        rms_norm(NAMESPACE, torch.empty_like(x.double()), x.double(), weight, EPS)
    with pytest.raises(RuntimeError, match="add_rms_norm: residual must be float32, got bfloat16"):
        add_rms_norm(NAMESPACE, torch.empty_like(x), x.bfloat16(), x, weight, EPS)
    with pytest.raises(RuntimeError, match=r"layer_norm: bias must have shape \[20\], got float32 of shape \[19\]"):
        layer_norm(NAMESPACE, torch.empty_like(x), x, weight, weight[:19], EPS)
