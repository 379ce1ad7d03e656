"""Norms, activations and moved rows for CUDA, run by the emulator, against float64 and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedllm.ops.kv_write import copy_blocks
from pagedllm.ops.linear import Activation, gated_activation, gather_rows, ungated_activation
from pagedllm.ops.norm import add_rms_norm, layer_norm, rms_norm
from tests.simt.attention_case import relative_error
from tests.simt.emulator import Emulator

SIMT = "pagedllm_simt"
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of a wider tensor, so that they are strided."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width + 16, generator=generator).to(dtype)[:, :width]


@pytest.fixture
def torch_device(pytestconfig: pytest.Config) -> str:
    """Where torch computes what our error is compared with: on a GPU its functions are less exact than on a CPU."""
    return "cuda" if pytestconfig.getoption("operators_on") == "cuda" else "cpu"


def on(device: str, *arguments: Any) -> list[Any]:
    return [argument.to(device) if isinstance(argument, Tensor) else argument for argument in arguments]


def norm_in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden_size", [64, 576, 8200])
def test_rms_norm_is_as_exact_as_torch(
    emulator: Emulator, torch_device: str, dtype: torch.dtype, hidden_size: int
) -> None:
    x, weight = random_rows(3, hidden_size, dtype), torch.rand(hidden_size) + 0.5
    out = torch.empty(3, hidden_size, dtype=dtype)
    rms_norm(SIMT, out, x, weight, 1e-5)
    expected = norm_in_float64(x, weight, 1e-5)
    own = torch.nn.functional.rms_norm(*on(torch_device, x.float(), (hidden_size,), weight), 1e-5).to("cpu", dtype)
    assert relative_error(out, expected) <= 2 * relative_error(own, expected)


def test_rms_norm_reads_a_row_twice_and_writes_it_once(emulator: Emulator) -> None:
    x = random_rows(3, 576, torch.bfloat16)
    out = torch.empty(3, 576, dtype=torch.bfloat16)
    rms_norm(SIMT, out, x, torch.ones(576), 1e-5)
    assert emulator.traffic()["x"].bytes_read == 2 * x.numel() * x.element_size()  # the second time from L1
    assert emulator.traffic()["out"].bytes_written == out.numel() * out.element_size()


@pytest.mark.parametrize("dtype", TYPES)
def test_add_rms_norm_rounds_the_residual_once_and_norms_that(
    emulator: Emulator, torch_device: str, dtype: torch.dtype
) -> None:
    x, residual = random_rows(5, 576, dtype), random_rows(5, 576, dtype, seed=1)
    weight, out = torch.rand(576) + 0.5, torch.empty(5, 576, dtype=dtype)
    added = (residual.float() + x.float()).to(dtype)
    add_rms_norm(SIMT, out, residual, x, weight, 1e-6)
    assert torch.equal(residual, added)
    expected = norm_in_float64(added, weight, 1e-6)
    own = torch.nn.functional.rms_norm(*on(torch_device, added.float(), (576,), weight), 1e-6).to("cpu", dtype)
    assert relative_error(out, expected) <= 2 * relative_error(own, expected)


def test_a_normed_row_has_the_same_bits_in_any_batch(emulator: Emulator) -> None:
    x, weight, out = random_rows(9, 2056, torch.bfloat16), torch.rand(2056), torch.empty(9, 2056, dtype=torch.bfloat16)
    rms_norm(SIMT, out, x, weight, 1e-5)
    for row in (0, 4, 8):
        alone = torch.empty(1, 2056, dtype=torch.bfloat16)
        rms_norm(SIMT, alone, x[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("hidden_size", [64, 576, 8200])
def test_layer_norm_is_as_exact_as_torch(
    emulator: Emulator, torch_device: str, dtype: torch.dtype, has_bias: bool, hidden_size: int
) -> None:
    x = random_rows(3, hidden_size, dtype) + 30  # far from zero: a mean of squares would lose digits
    weight, bias = torch.rand(hidden_size) + 0.5, torch.randn(hidden_size) if has_bias else None
    out = torch.empty(3, hidden_size, dtype=dtype)
    layer_norm(SIMT, out, x, weight, bias, 1e-5)
    wide = None if bias is None else bias.double()
    expected = torch.nn.functional.layer_norm(x.double(), (hidden_size,), weight.double(), wide, 1e-5)
    arguments = on(torch_device, x.float(), (hidden_size,), weight, bias)
    own = torch.nn.functional.layer_norm(*arguments, 1e-5).to("cpu", dtype)
    assert relative_error(out, expected) <= 2 * relative_error(own, expected)
    alone = x[2:].clone()
    layer_norm(SIMT, alone, alone, weight, bias, 1e-5)  # in place
    assert torch.equal(alone[0], out[2])


def activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == Activation.SILU:
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == Activation.GELU_TANH else "none")


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation == Activation.CLAMPED_SWISH:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return activated(gate, activation) * up


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", list(Activation)[1:])
def test_gated_activation_is_as_exact_as_torch(
    emulator: Emulator, torch_device: str, dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = random_rows(3, 2 * 1096, dtype) * (4 if activation == Activation.CLAMPED_SWISH else 1)
    gate, up = gate_up[:, :1096], gate_up[:, 1096:]
    out = torch.empty(3, 1096, dtype=dtype)
    gated_activation(SIMT, out, gate, up, activation)
    expected = gated(gate.double(), up.double(), activation)
    own = gated(*on(torch_device, gate.float(), up.float()), activation).to("cpu", dtype)
    assert relative_error(out, expected) <= 2 * relative_error(own, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU])
def test_ungated_activation_is_as_exact_as_torch(
    emulator: Emulator, torch_device: str, dtype: torch.dtype, activation: Activation
) -> None:
    x = random_rows(3, 1096, dtype)
    out = x.clone()
    ungated_activation(SIMT, out, out, activation)  # in place
    expected = activated(x.double(), activation)
    own = activated(*on(torch_device, x.float()), activation).to("cpu", dtype)
    assert relative_error(out, expected) <= 2 * relative_error(own, expected)


def test_activations_that_need_a_gate_are_refused_without_one(emulator: Emulator) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="ungated_activation: activation must be from 1 to 3, got 4"):
        ungated_activation(SIMT, x, x, Activation.CLAMPED_SWISH)
    with pytest.raises(RuntimeError, match="gated_activation: activation must be from 1 to 4, got 0"):
        gated_activation(SIMT, x, x, x, Activation.NONE)


@pytest.mark.parametrize("dtype", TYPES)
def test_gather_rows_copies_bits(emulator: Emulator, dtype: torch.dtype) -> None:
    x = random_rows(7, 4104, dtype)
    indices = torch.tensor([6, 0, 0, 3], dtype=torch.int32)
    out = torch.empty(4, 4104, dtype=dtype)
    gather_rows(SIMT, out, x, indices)
    assert torch.equal(out, x[indices.long()])


def test_copy_blocks_copies_bits_and_leaves_the_rest(emulator: Emulator) -> None:
    k_cache, v_cache = (torch.randn(6, 2, 16, 80).to(torch.bfloat16) for _ in range(2))
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache in expected:
        cache[5], cache[0] = cache[1], cache[3]
    copy_blocks(SIMT, k_cache, v_cache, torch.tensor([[1, 5], [3, 0]], dtype=torch.int32))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_nothing_to_do_launches_nothing(emulator: Emulator) -> None:
    before = emulator.counters()["launches"]
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    rms_norm(SIMT, empty, empty.clone(), torch.ones(64), 1e-5)
    gated_activation(SIMT, empty, empty.clone(), empty.clone(), Activation.SILU)
    gather_rows(SIMT, empty, torch.ones(3, 64, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32))
    cache = torch.zeros(2, 1, 16, 64, dtype=torch.bfloat16)
    copy_blocks(SIMT, cache, cache.clone(), torch.empty(0, 2, dtype=torch.int32))
    assert emulator.counters()["launches"] == before


def test_rows_that_cannot_be_read_16_bytes_at_a_time_are_refused_by_name(emulator: Emulator) -> None:
    x = torch.ones(2, 70, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="rms_norm: x must have rows of whole 16 bytes"):
        rms_norm(SIMT, torch.empty_like(x), x, torch.ones(70), 1e-5)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="rms_norm: weight must be float32, got bfloat16"):
        rms_norm(SIMT, torch.empty_like(x), x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
