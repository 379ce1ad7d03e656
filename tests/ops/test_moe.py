"""Routing, grouped products and their sum: right, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.library import load_kernels
from pagedllm.ops.linear import Activation, packed_linear
from pagedllm.ops.moe import combine_experts, grouped_linear, route_tokens
from tests.ops.test_linear import DTYPES, interleave, pack, randn

NAMESPACE = load_kernels().namespace


def route(logits: Tensor, num_chosen: int, is_normalized: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, places, tokens, bounds."""
    num_tokens, num_experts = logits.shape
    weights = torch.full((num_tokens, num_chosen), torch.nan)
    places = torch.full((num_tokens, num_chosen), -7, dtype=torch.int32)
    tokens = torch.full((num_tokens * num_chosen,), -7, dtype=torch.int32)
    bounds = torch.full((num_experts + 1,), -7, dtype=torch.int32)
    route_tokens(NAMESPACE, weights, places, tokens, bounds, logits, is_normalized)
    return weights, places, tokens, bounds


def test_rows_are_ordered_by_expert_and_then_by_token() -> None:
    logits = torch.tensor([[5.0, 0, 4], [0, 1, 6], [7, 1, 2]])
    weights, places, tokens, bounds = route(logits, 2)
    assert bounds.tolist() == [0, 2, 3, 6]  # tokens 0 and 2 chose expert 0, token 1 expert 1, all expert 2
    assert tokens.tolist() == [0, 2, 1, 0, 1, 2]
    assert places.tolist() == [[0, 3], [2, 4], [1, 5]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(-1, torch.tensor([[0, 2], [1, 2], [0, 2]])))


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    _, _, _, bounds = route(torch.tensor([[1.0, 3, 3, 3, 2]]), 2)
    assert bounds.tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 1, 1), (70, 5, 5), (33, 130, 8), (0, 4, 2)])
def test_routing_is_the_twins(num_tokens: int, num_experts: int, num_chosen: int, is_normalized: bool) -> None:
    logits = 3 * randn(num_tokens, num_experts + 3)[:, :num_experts]
    ours = route(logits, num_chosen, is_normalized)
    theirs = tuple(torch.empty_like(tensor) for tensor in ours)
    route_tokens.reference(*theirs, logits, is_normalized)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=0)
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(mine, other)


def test_a_row_that_is_not_a_number_spoils_no_other() -> None:
    logits = randn(6, 9)
    expected, _, _, _ = route(logits, 3)
    logits[2] = torch.nan
    weights, places, tokens, bounds = route(logits, 3)
    assert weights[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(weights[rest], expected[rest])
    assert sorted(places.flatten().tolist()) == list(range(18))
    assert tokens[places.long()].tolist() == [[token] * 3 for token in range(6)]
    assert bounds[-1] == 18


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU, Activation.CLAMPED_SWISH])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_grouped_row_has_the_bits_of_its_own_product(
    dtype: torch.dtype, activation: Activation, num_threads: int
) -> None:
    num_rows = [3, 0, 1, 40, 0]
    bounds = torch.tensor([0, 3, 3, 4, 44, 44], dtype=torch.int32)
    x, k, columns = randn(44, 70, dtype=dtype)[:, :69], 69, 100
    weights, biases = [], []
    for expert in range(5):
        rows = randn(2 * columns, k, dtype=dtype, seed=expert)
        is_gated = activation != Activation.NONE
        weights.append(pack(interleave(rows[:columns], rows[columns:])) if is_gated else pack(rows[:columns]))
        biases.append(randn(len(weights[-1]) * 64, seed=expert + 10))
    stacked, stacked_biases = torch.stack(weights), torch.stack(biases)
    torch.set_num_threads(num_threads)
    out = torch.full((44, columns), torch.nan, dtype=dtype)
    grouped_linear(NAMESPACE, out, x, stacked, stacked_biases, bounds, activation)
    begin = 0
    for expert, count in enumerate(num_rows):
        for row in range(begin, begin + count):
            alone = torch.empty(1, columns, dtype=dtype)
            packed_linear(NAMESPACE, alone, x[row : row + 1], weights[expert], biases[expert], None, activation)
            assert torch.equal(out[row : row + 1], alone), (expert, row)
        begin += count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_shared", [False, True])
def test_results_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, has_shared: bool) -> None:
    weights, places, _, _ = route(randn(19, 6), 3)
    rows, residual, shared = (randn(n, 50, dtype=dtype, seed=n)[:, :49] for n in (57, 19, 20))
    gates = randn(19, 1, seed=9)
    out = torch.full((19, 49), torch.nan, dtype=dtype)
    own = (shared[:19], gates) if has_shared else (None, None)
    combine_experts(NAMESPACE, out, rows, places, weights, *own, residual)
    exact = (rows.double()[places.long()] * weights.double()[..., None]).sum(1) + residual.double()
    if has_shared:
        exact += gates.double().sigmoid() * shared[:19].double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=2e-6)
    in_place = residual.clone()
    combine_experts(NAMESPACE, in_place, rows, places, weights, *own, in_place)
    assert torch.equal(in_place, out)
    alone = torch.empty(1, 49, dtype=dtype)
    own = (shared[7:8], gates[7:8]) if has_shared else (None, None)
    mine = torch.arange(3, dtype=torch.int32)[None]
    combine_experts(NAMESPACE, alone, rows[places[7].long()], mine, weights[7:8], *own, residual[7:8])
    assert torch.equal(alone, out[7:8])


def test_opcheck_finds_the_schemas_right() -> None:
    ops = torch.ops.pagedllm
    places, tokens, bounds = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(3)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    torch.library.opcheck(
        ops.route_tokens.default, (torch.empty(2, 1), places, tokens, bounds.clone(), torch.zeros(2, 2), False)
    )
    weights = torch.zeros(2, 1, 8, 64)
    torch.library.opcheck(ops.grouped_linear.default, (torch.empty(2, 64), torch.zeros(2, 8), weights, None, bounds, 0))
    torch.library.opcheck(
        ops.combine_experts.default,
        (torch.empty(2, 8), torch.zeros(2, 8), places, torch.zeros(2, 1), None, None, None),
    )


def test_wrong_arguments_are_refused_by_name() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="route_tokens: places must have from 1 to 4 columns"):
        route(logits, 5)
    x, weights = torch.zeros(2, 8), torch.zeros(2, 1, 8, 64)
    for limits in ([0, 1, 1], [1, 1, 2], [0, 3, 2], [0, -1, 2]):
        with pytest.raises(RuntimeError, match=r"grouped_linear: bounds must (rise from 0|hold values)"):
            grouped_linear(NAMESPACE, torch.empty(2, 64), x, weights, None, torch.tensor(limits, dtype=torch.int32), 0)
    with pytest.raises(RuntimeError, match="grouped_linear: out must have as many columns as 1 panels of 64 hold"):
        grouped_linear(NAMESPACE, torch.empty(2, 65), x, weights, None, torch.tensor([0, 1, 2], dtype=torch.int32), 0)
    places = torch.tensor([[0], [2]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="combine_experts: places must hold values from 0 to 1, holds 2 at 1"):
        combine_experts(NAMESPACE, torch.empty(2, 8), x, places, torch.zeros(2, 1), None, None, None)
