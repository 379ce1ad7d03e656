"""embedding, gather_rows and the activations."""

from __future__ import annotations

import pytest
import torch

from pagedllm.ops.library import load_kernels
from pagedllm.ops.linear import (
    Activation,
    apply_gated,
    embedding,
    gated_activation,
    gather_rows,
    ungated_activation,
)
from tests.ops.test_linear import pack, randn

NAMESPACE = load_kernels().namespace
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 33, 64])
def test_embedding_reads_rows_of_the_packed_head(dtype: torch.dtype, hidden_size: int) -> None:
    table = randn(150, hidden_size, dtype=dtype)
    ids = torch.tensor([0, 149, 63, 64, 5, 5], dtype=torch.int32)
    out = torch.full((6, hidden_size + 2), torch.nan, dtype=dtype)
    embedding(NAMESPACE, out[:, :hidden_size], ids, pack(table), 1.0)
    assert torch.equal(out[:, :hidden_size], table[ids.long()])
    assert out[:, hidden_size:].isnan().all()
    embedding(NAMESPACE, out[:, :hidden_size], ids, pack(table), 24.0)
    assert torch.equal(out[:, :hidden_size], (table[ids.long()].float() * 24).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows_of_strided_rows(dtype: torch.dtype) -> None:
    x = randn(300, 50, dtype=dtype)
    indices = torch.tensor([299, 0, 17, 17] * 60, dtype=torch.int32)
    out = torch.full((240, 45), torch.nan, dtype=dtype)
    gather_rows(NAMESPACE, out[:, :40], x[:, 5:45], indices)
    assert torch.equal(out[:, :40], x[indices.long(), 5:45])
    assert out[:, 40:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU, Activation.CLAMPED_SWISH]
)
def test_error_of_gated_activation_is_at_most_twice_torchs_own(dtype: torch.dtype, activation: Activation) -> None:
    gate = torch.linspace(-30, 30, 20 * 501).reshape(20, 501).to(dtype)
    up = randn(20, 501, dtype=dtype)
    out = torch.empty_like(gate)
    gated_activation(NAMESPACE, out, gate, up, activation)
    exact = apply_gated(gate.double(), up.double(), activation)
    own_error = apply_gated(gate, up, activation).double() - exact
    assert float((out - exact).abs().max()) <= 2 * float(own_error.abs().max())


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU])
def test_activation_of_extreme_values(activation: Activation) -> None:
    gate = torch.tensor([[torch.inf, torch.nan, 1e30, -1e30, -200.0, 0.0, 1e-30]])
    out = torch.empty_like(gate)
    gated_activation(NAMESPACE, out, gate, torch.ones_like(gate), activation)
    assert out[0, 0] == torch.inf
    assert out[0, 1].isnan()
    assert out[0, 2] == 1e30
    assert torch.equal(out[0, 3:6], torch.zeros(3))
    assert out[0, 6] == pytest.approx(5e-31, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU])
def test_ungated_activation_in_place_is_the_gated_one_times_one(dtype: torch.dtype, activation: Activation) -> None:
    x = torch.linspace(-30, 30, 20 * 501).reshape(20, 501).to(dtype)
    expected = torch.empty_like(x)
    gated_activation(NAMESPACE, expected, x, torch.ones_like(x), activation)
    wide = torch.full((20, 512), torch.nan, dtype=dtype)
    wide[:, :501] = x
    ungated_activation(NAMESPACE, wide[:, :501], wide[:, :501], activation)
    assert torch.equal(wide[:, :501], expected)
    assert wide[:, 501:].isnan().all()


def test_opcheck() -> None:
    x = randn(3, 8)
    ids = torch.tensor([0, 2], dtype=torch.int32)
    torch.library.opcheck(torch.ops.pagedllm.embedding.default, (torch.empty(2, 8), ids, pack(x), 1.0))
    torch.library.opcheck(torch.ops.pagedllm.gather_rows.default, (torch.empty(2, 8), x, ids))
    torch.library.opcheck(torch.ops.pagedllm.gated_activation.default, (torch.empty(3, 8), x, x, 1))
    torch.library.opcheck(torch.ops.pagedllm.ungated_activation.default, (torch.empty(3, 8), x, 1))


def test_wrong_arguments_are_named() -> None:
    x = randn(3, 8)
    with pytest.raises(RuntimeError, match="embedding: token_ids must hold values from 0 to 63, holds -1 at 1"):
        embedding(NAMESPACE, torch.empty(2, 8), torch.tensor([0, -1], dtype=torch.int32), pack(x), 1.0)
    with pytest.raises(RuntimeError, match="embedding: token_ids must be int32, got int64"):
        embedding(NAMESPACE, torch.empty(2, 8), torch.tensor([0, 1]), pack(x), 1.0)
    with pytest.raises(RuntimeError, match="gather_rows: indices must hold values from 0 to 2, holds 3 at 0"):
        gather_rows(NAMESPACE, torch.empty(1, 8), x, torch.tensor([3], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="gated_activation: activation must be from 1 to 4, got 0"):
        gated_activation(NAMESPACE, x.clone(), x, x, 0)
    with pytest.raises(RuntimeError, match=r"gated_activation: up must have shape \[3, 8\]"):
        gated_activation(NAMESPACE, x.clone(), x, x[:, :7], 1)
    with pytest.raises(RuntimeError, match="ungated_activation: activation must be from 1 to 3, got 0"):
        ungated_activation(NAMESPACE, x.clone(), x, 0)
    with pytest.raises(RuntimeError, match="ungated_activation: activation must be from 1 to 3, got 4"):
        ungated_activation(NAMESPACE, x.clone(), x, Activation.CLAMPED_SWISH)
