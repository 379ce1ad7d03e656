"""Products of rows with the weights of their experts, run by the emulator, against float64 and the twin."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pagedllm.ops.linear import Activation, apply_gated
from pagedllm.ops.moe import grouped_dense
from tests.simt.attention_case import relative_error
from tests.simt.emulator import Emulator

SIMT = "pagedllm_simt"


def make_product(
    counts: list[int], k: int, width: int, dtype: torch.dtype, activation: Activation, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """out, x, weights, biases, bounds; counts: rows of each expert. Rows are strided; NaN lies between them."""
    generator = torch.Generator().manual_seed(0)
    num_rows, weight_rows = sum(counts), width * (2 if activation else 1)
    x = torch.full((num_rows, k + 8), torch.nan, dtype=dtype)
    x[:, :k] = torch.randn(num_rows, k, generator=generator)
    weights = (torch.randn(len(counts), weight_rows, k, generator=generator) * k**-0.5).to(dtype)
    biases = torch.randn(len(counts), weight_rows, generator=generator).to(dtype) if has_bias else None
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return torch.full((num_rows, width + 8), torch.nan, dtype=dtype)[:, :width], x[:, :k], weights, biases, bounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("counts", "k", "width", "activation", "has_bias"),
    [
        ([1], 8, 8, Activation.NONE, False),
        ([3, 0, 20, 1, 0, 0, 17], 72, 104, Activation.NONE, True),  # tiles of 16 rows
        ([0, 70, 0, 1, 64], 200, 72, Activation.SILU, False),  # of 64
        ([5, 2, 0, 9], 328, 40, Activation.CLAMPED_SWISH, True),
        ([40, 33], 64, 64, Activation.GELU_TANH, True),
    ],
)
def test_experts_products_are_as_exact_as_float32_sums(
    emulator: Emulator,
    dtype: torch.dtype,
    counts: list[int],
    k: int,
    width: int,
    activation: Activation,
    has_bias: bool,
) -> None:
    out, x, weights, biases, bounds = make_product(counts, k, width, dtype, activation, has_bias)
    twin = torch.empty_like(out)
    grouped_dense.reference(twin, x, weights, biases, bounds, activation)
    exact = torch.empty(out.shape, dtype=torch.float64)
    wide = None if biases is None else biases.double()
    exact_product(exact, x.double(), weights.double(), wide, bounds.tolist(), activation)
    grouped_dense(SIMT, out, x, weights, biases, bounds, activation)
    assert relative_error(out, exact) <= 1.2 * relative_error(twin, exact)


def exact_product(
    out: Tensor, x: Tensor, weights: Tensor, biases: Tensor | None, bounds: list[int], activation: Activation
) -> None:
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        product = x[begin:end] @ weights[expert].T + (0 if biases is None else biases[expert])
        out[begin:end] = apply_gated(*product.chunk(2, 1), activation) if activation else product


def test_a_row_has_the_same_bits_however_many_its_expert_has(emulator: Emulator) -> None:
    """Alone in a tile of 16, and among 70 in tiles of 64."""
    out, x, weights, biases, bounds = make_product([70, 40], 136, 48, torch.bfloat16, Activation.SILU, True)
    grouped_dense(SIMT, out, x, weights, biases, bounds, Activation.SILU)
    for row in (0, 15, 16, 69, 70, 109):
        alone = torch.empty_like(out[:1])
        own = torch.tensor([0, 1, 1] if row < 70 else [0, 0, 1], dtype=torch.int32)
        grouped_dense(SIMT, alone, x[row : row + 1], weights, biases, own, Activation.SILU)
        assert torch.equal(alone[0], out[row])


def test_a_captured_product_serves_other_routings(emulator: Emulator) -> None:
    out, x, weights, biases, bounds = make_product([4, 0, 8, 12], 72, 40, torch.bfloat16, Activation.SILU, False)
    emulator.capture_begin()
    grouped_dense(SIMT, out, x, weights, biases, bounds, Activation.SILU)
    emulator.capture_end()
    for counts in ([4, 0, 8, 12], [24, 0, 0, 0], [0, 1, 22, 1], [6, 6, 6, 6]):
        bounds.copy_(torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]))
        emulator.replay()
        twin = torch.empty_like(out)
        grouped_dense.reference(twin, x, weights, biases, bounds, Activation.SILU)
        assert relative_error(out, twin.double()) < 5e-3


def test_weights_are_read_once_where_experts_have_few_rows(emulator: Emulator) -> None:
    """All of the experts that have rows, and nothing of the others'."""
    arguments = make_product([3, 0, 16, 1], 128, 64, torch.bfloat16, Activation.SILU, False)
    grouped_dense(SIMT, *arguments, Activation.SILU)
    assert emulator.traffic()["weights"].bytes_read == 3 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.empty(4, 80, 64, dtype=torch.bfloat16)}, r"weights must have shape \[4, 80, 72\]"),
        ({"bounds": torch.zeros(4, dtype=torch.int32)}, r"bounds must have shape \[5\]"),
        ({"x": torch.empty(24, 72)}, "x must be bfloat16 or float16"),
        ({"out": torch.empty(24, 48, dtype=torch.bfloat16)[:, :36]}, "out must have rows of whole 16 bytes"),
        ({"activation": 5}, "activation must be from 0 to 4, got 5"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(emulator: Emulator, change: dict[str, object], message: str) -> None:
    names = ("out", "x", "weights", "biases", "bounds", "activation")
    given = make_product([4, 0, 8, 12], 72, 40, torch.bfloat16, Activation.SILU, False)
    arguments = {**dict(zip(names, (*given, 1), strict=True)), **change}
    with pytest.raises(RuntimeError, match=f"grouped_dense: {message}"):
        grouped_dense(SIMT, *arguments.values())
