"""packed_linear: right within PyTorch's own error, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.elementwise import finish_logits
from pagedllm.ops.library import load_kernels
from pagedllm.ops.linear import (
    GATED_HALF,
    PANEL,
    Activation,
    apply_activation,
    packed_argmax,
    packed_linear,
    packed_shape,
    unpack,
)
from pagedllm.ops.sampling import likeliest

NAMESPACE = load_kernels().namespace
DTYPES = (torch.bfloat16, torch.float32)
GATED = (Activation.SILU, Activation.GELU_TANH, Activation.GELU)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def pack(rows: Tensor) -> Tensor:
    """[N, K] -> the packed weight, padding zero."""
    n, k = rows.shape
    num_panels = -(-n // PANEL)
    if rows.dtype == torch.float32:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, num_panels * PANEL - n))
        return padded.view(num_panels, PANEL, k).transpose(1, 2).contiguous()
    padded = torch.nn.functional.pad(rows, (0, k % 2, 0, num_panels * PANEL - n))
    return padded.view(num_panels, PANEL, -1, 2).transpose(1, 2).contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of a gated weight in packed order: 32 of the gate, then the same 32 of up; padded to whole panels."""
    padding = -len(gate) % GATED_HALF
    halves = [torch.nn.functional.pad(w, (0, 0, 0, padding)).unflatten(0, (-1, GATED_HALF)) for w in (gate, up)]
    return torch.stack(halves, 1).flatten(0, 2)


def multiply(x: Tensor, weight: Tensor, num_columns: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """The operator without epilogue."""
    out = torch.full((len(x), num_columns), torch.nan, dtype=out_dtype or x.dtype)
    packed_linear(NAMESPACE, out, x, weight, None, None, Activation.NONE)
    return out


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def test_pack_is_the_inverse_of_unpack() -> None:
    for dtype in DTYPES:
        rows = randn(70, 33, dtype=dtype)
        assert pack(rows).shape == packed_shape(70, 33, dtype)
        assert torch.equal(unpack(pack(rows))[:70, :33], rows)
        assert not unpack(pack(rows))[70:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 63, 576, 1025, 3000])
def test_error_is_at_most_twice_torchs_own(dtype: torch.dtype, k: int) -> None:
    x, w = randn(19, k, dtype=dtype, seed=k), randn(200, k, dtype=dtype, seed=k + 1)
    exact = x.double() @ w.double().T
    own_error = rms(torch.nn.functional.linear(x, w) - exact)
    assert rms(multiply(x, pack(w), 200) - exact) <= 2 * own_error
    if dtype == torch.bfloat16:  # float32 out of bfloat16, as the LM head: no rounding at the end
        float_error = rms(torch.nn.functional.linear(x.float(), w.float()) - exact)
        assert rms(multiply(x, pack(w), 200, torch.float32) - exact) <= 3 * float_error


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_multiplied_exactly_and_in_place(dtype: torch.dtype) -> None:
    """Every (row, column, k) meets the right partner: small integers leave no room for rounding."""
    for m, n, k in ((1, 1, 1), (3, 64, 5), (7, 65, 64), (13, 130, 31), (2, 100, 600), (50, 33, 1500)):
        x = torch.randint(-2, 3, (m, k), generator=generator(m)).to(dtype)
        w = torch.randint(-2, 3, (n, k), generator=generator(n)).to(dtype)
        assert torch.equal(multiply(x, pack(w), n, torch.float32), x.float() @ w.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(64, 65), (577, 130), (1040, 700)])
def test_bits_of_a_row_depend_on_that_row_alone(dtype: torch.dtype, k: int, n: int) -> None:
    """Not on the number of rows (1 to 40), nor on the place among them, nor on the number of threads."""
    rows, weight = randn(41, k, dtype=dtype, seed=3), pack(randn(n, k, dtype=dtype, seed=4))
    expected = torch.cat([multiply(rows[i : i + 1], weight, n, torch.float32) for i in range(41)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for m in range(1, 41):
                first = (m * 7) % (41 - m + 1)  # another place for each row in each batch
                batch = multiply(rows[first : first + m], weight, n, torch.float32)
                assert torch.equal(batch, expected[first : first + m]), (m, num_threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_are_the_same_in_large_batches(dtype: torch.dtype) -> None:
    for k in (96, 576, 2500):
        rows, weight = randn(700, k, dtype=dtype, seed=5), pack(randn(900, k, dtype=dtype, seed=6))
        expected = torch.cat([multiply(row[None], weight, 900, torch.float32) for row in rows])
        for m in (64, 97, 200, 511, 700):
            assert torch.equal(multiply(rows[-m:], weight, 900, torch.float32), expected[-m:]), (k, m)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_neither_read_from_x_nor_written_to_out(dtype: torch.dtype) -> None:
    """Rows lie in wider rows of NaN; an odd K ends one element before such a NaN."""
    m, n, k = 9, 77, 45
    wide_x = torch.full((m, k + 3), torch.nan, dtype=dtype)
    wide_x[:, :k] = randn(m, k, dtype=dtype)
    weight = pack(randn(n, k, dtype=dtype, seed=1))
    for out_dtype in {dtype, torch.float32}:
        wide_out = torch.full((m, n + 30), torch.nan, dtype=out_dtype)
        packed_linear(NAMESPACE, wide_out[:, :n], wide_x[:, :k], weight, None, None, Activation.NONE)
        expected = multiply(wide_x[:, :k].contiguous(), weight, n, out_dtype)
        assert torch.equal(wide_out[:, :n], expected)
        assert not expected.isnan().any()
        assert wide_out[:, n:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("width", [32, 64, 100])
def test_gated_product_with_bias_and_residual(dtype: torch.dtype, activation: Activation, width: int) -> None:
    m, k = 11, 60
    x, residual = randn(m, k, dtype=dtype, seed=1), randn(m, width, dtype=dtype, seed=2)
    gate, up = randn(width, k, dtype=dtype, seed=3) / 3, randn(width, k, dtype=dtype, seed=4) / 3
    gate_bias, up_bias = randn(width, seed=5), randn(width, seed=6)
    bias = interleave(gate_bias[:, None], up_bias[:, None])[:, 0].contiguous()
    exact_gate = x.double() @ gate.double().T + gate_bias
    exact_up = x.double() @ up.double().T + up_bias
    exact = apply_activation(exact_gate, activation) * exact_up + residual.double()
    torchs = (
        torch.nn.functional.linear(x, gate, gate_bias.to(dtype)),
        torch.nn.functional.linear(x, up, up_bias.to(dtype)),
    )
    own_error = (apply_activation(torchs[0], activation) * torchs[1] + residual).double() - exact

    out = torch.empty(m, width, dtype=dtype)
    packed_linear(NAMESPACE, out, x, pack(interleave(gate, up)), bias, residual, activation)
    assert rms(out - exact) <= 2 * rms(own_error)
    in_place = residual.clone()
    packed_linear(NAMESPACE, in_place, x, pack(interleave(gate, up)), bias, in_place, activation)
    assert torch.equal(in_place, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual_of_a_plain_product(dtype: torch.dtype) -> None:
    """Exact in whole numbers; the residual may be the output and may be strided."""
    x = torch.randint(-2, 3, (8, 30), generator=generator(0)).to(dtype)
    w = torch.randint(-2, 3, (70, 30), generator=generator(1)).to(dtype)
    bias = torch.zeros(128)
    bias[:70] = torch.arange(70) - 35
    stream = torch.full((8, 90), torch.nan, dtype=dtype)
    stream[:, :70] = torch.randint(-9, 9, (8, 70), generator=generator(2)).to(dtype)
    expected = (x.float() @ w.float().T + bias[:70] + stream[:, :70].float()).to(dtype)
    packed_linear(NAMESPACE, stream[:, :70], x, pack(w), bias, stream[:, :70], Activation.NONE)
    assert torch.equal(stream[:, :70], expected)
    assert stream[:, 70:].isnan().all()


def argmax(x: Tensor, weight: Tensor, num_columns: int, scale: float = 1.0, softcap: float = 0.0) -> list[int]:
    token_ids = torch.full((len(x),), -7, dtype=torch.int32)
    packed_argmax(NAMESPACE, token_ids, x, weight, num_columns, scale, softcap)
    return token_ids.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(3, 1), (5, 17), (64, 130), (577, 700), (1030, 3000)])
def test_argmax_is_that_of_the_finished_product_for_any_number_of_rows_and_threads(
    dtype: torch.dtype, k: int, n: int
) -> None:
    """Coarse values and caps make many ties."""
    rows, weight = randn(41, k, dtype=dtype, seed=7), pack(randn(n, k, dtype=dtype, seed=8))
    coarse = (rows * 2).round() / 2, pack((unpack(weight)[:n, :k] * 2).round() / 2)
    before = torch.get_num_threads()
    try:
        for x, w in ((rows, weight), coarse):
            for scale, softcap in ((1.0, 0.0), (0.07, 0.0), (1.0, 1.5), (3.0, 2.0)):
                logits = multiply(x, w, n, torch.float32)
                finish_logits(NAMESPACE, logits, scale, softcap)
                expected = likeliest(logits).tolist()
                for m, num_threads in ((1, 1), (1, 2), (7, 3), (41, 1), (41, 2)):
                    torch.set_num_threads(num_threads)
                    assert argmax(x[-m:], w, n, scale, softcap) == expected[-m:]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_equal_logits_is_the_lowest_column_and_padding_is_none(dtype: torch.dtype) -> None:
    table = torch.full((200, 4), -1.0, dtype=dtype)
    assert argmax(torch.ones(3, 4, dtype=dtype), pack(table), 200) == [0] * 3  # padding would give 0 > -4
    for columns in ([7, 8], [63, 64, 199], [20, 36], [199], [130, 5 + 130]):
        table.fill_(-1.0)
        table[columns] = 2.0
        assert argmax(torch.ones(2, 4, dtype=dtype), pack(table), 200) == [columns[0]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 15, 64, 69])
def test_argmax_says_which_rows_are_not_finite(dtype: torch.dtype, column: int) -> None:
    """One logit of a row is set, whatever the others are: rows of the identity choose what the column holds."""
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, 5.0], dtype=dtype)
    for number, value in enumerate(specials):
        table = torch.zeros(70, 4, dtype=dtype)
        table[column, 3] = value
        x = torch.eye(4, dtype=dtype)[[0, 3]]
        logits = multiply(x, pack(table), 70, torch.float32)
        lowest_other = 1 if column == 0 else 0
        expected = (-1, -1, lowest_other, column)[number]
        # 0 x infinity is NaN, as in the product itself
        assert argmax(x, pack(table), 70) == likeliest(logits).tolist()
        assert argmax(x[1:], pack(table), 70) == [expected]
        capped = column if number == 1 else expected  # a cap makes infinity finite
        assert argmax(x[1:], pack(table), 70, softcap=2.0) == [capped]
    table = torch.full((70, 1), -torch.inf, dtype=dtype)
    assert argmax(torch.ones(1, 1, dtype=dtype), pack(table), 70) == [-1]


def test_nothing_happens_without_rows() -> None:
    packed_linear(NAMESPACE, torch.empty(0, 64), torch.empty(0, 8), pack(randn(64, 8)), None, None, Activation.NONE)


def test_opcheck() -> None:
    x, weight = randn(3, 8), pack(randn(70, 8))
    operator = torch.ops.pagedllm.packed_linear.default
    torch.library.opcheck(operator, (torch.empty(3, 70), x, weight, randn(128), randn(3, 70), 0))
    torch.library.opcheck(operator, (torch.empty(3, 64), x, weight, None, None, 1))
    token_ids = torch.empty(3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.pagedllm.packed_argmax.default, (token_ids, x, weight, 70, 1.0, 0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.float16)}, "packed_linear: x must be bfloat16 or float32, got float16"),
        ({"x": torch.zeros(8)}, r"packed_linear: x must have 2 dimensions, got float32 of shape \[8\]"),
        ({"x": torch.zeros(8, 2).T}, "packed_linear: x must have rows whose elements lie side by side"),
        ({"out": torch.zeros(3, 64)}, r"packed_linear: out must have shape \[2, 64\], got float32 of shape \[3, 64\]"),
        ({"out": torch.zeros(2, 65)}, "packed_linear: out must have as many columns as 1 panels of 64 hold"),
        ({"out": torch.zeros(2, 64, dtype=torch.bfloat16)}, "packed_linear: out must be float32, got bfloat16"),
        ({"weight": torch.zeros(1, 9, 64)}, r"packed_linear: weight must have shape \[1, 8, 64\]"),
        ({"weight": torch.zeros(1, 4, 64, 2, dtype=torch.bfloat16)}, "packed_linear: weight must have 3 dimensions"),
        ({"bias": torch.zeros(63)}, r"packed_linear: bias must have shape \[64\]"),
        ({"bias": torch.zeros(64, dtype=torch.bfloat16)}, "packed_linear: bias must be float32, got bfloat16"),
        ({"residual": torch.zeros(2, 63)}, r"packed_linear: residual must have shape \[2, 64\]"),
        ({"activation": 5}, "packed_linear: activation must be from 0 to 4, got 5"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {
        "out": torch.zeros(2, 64),
        "x": torch.zeros(2, 8),
        "weight": torch.zeros(1, 8, 64),
        "bias": None,
        "residual": None,
        "activation": 0,
    } | change
    with pytest.raises(RuntimeError, match=message):
        packed_linear(NAMESPACE, **arguments)  # type: ignore[arg-type]


def test_wrong_arguments_of_argmax_are_named() -> None:
    token_ids, x, weight = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8), torch.zeros(1, 8, 64)
    with pytest.raises(RuntimeError, match=r"packed_argmax: token_ids must have shape \[2\]"):
        packed_argmax(NAMESPACE, token_ids[:1], x, weight, 64, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="packed_argmax: num_columns must be what 1 panels of 64 hold, got 65"):
        packed_argmax(NAMESPACE, token_ids, x, weight, 65, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="packed_argmax: softcap must be 0 or above, got -1"):
        packed_argmax(NAMESPACE, token_ids, x, weight, 64, 1.0, -1.0)
