"""finish_logits, add_rows and clamp_rows."""

from __future__ import annotations

import pytest
import torch

from pagedllm.ops.elementwise import add_rows, clamp_rows, finish_logits
from pagedllm.ops.library import load_kernels
from tests.ops.test_linear import randn

NAMESPACE = load_kernels().namespace
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 30.0), (0.0625, 0.0), (1 / 3, 5.0)])
def test_error_of_finished_logits_is_at_most_twice_torchs_own(scale: float, softcap: float) -> None:
    logits = torch.linspace(-80, 80, 20 * 501).reshape(20, 501)
    exact = logits.double() * torch.tensor(scale).double()
    if softcap:
        exact = softcap * torch.tanh(exact / softcap)
    torchs, ours = logits.clone(), torch.full((20, 520), torch.nan)
    finish_logits.reference(torchs, scale, softcap)
    ours[:, :501] = logits
    finish_logits(NAMESPACE, ours[:, :501], scale, softcap)
    own_error = float((torchs - exact).abs().max())
    assert float((ours[:, :501] - exact).abs().max()) <= 2 * own_error
    assert ours[:, 501:].isnan().all()


def test_a_row_of_logits_is_finished_to_the_same_bits_everywhere() -> None:
    row = 40 * randn(1003)
    alone = row.clone()[None]
    finish_logits(NAMESPACE, alone, 0.5, 30.0)
    for num_rows in (2, 3, 7, 64):
        for place in {0, num_rows // 2, num_rows - 1}:
            batch = randn(num_rows, 1003, seed=1)
            batch[place] = row
            finish_logits(NAMESPACE, batch, 0.5, 30.0)
            assert torch.equal(batch[place], alone[0])


def test_caps_keep_order_and_nan() -> None:
    logits = torch.tensor([[-torch.inf, -1e30, -31.0, 0.0, 1e-20, 29.0, 1e30, torch.inf, torch.nan]])
    finish_logits(NAMESPACE, logits, 1.0, 30.0)
    assert logits[0, -1].isnan()
    assert logits[0, 4] == pytest.approx(1e-20, rel=1e-6)
    finite = logits[0, :-1]
    assert bool((finite.diff() >= 0).all())
    assert finite[0] == finite[1] == -30
    assert finite[-1] == finite[-2] == 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_clamp_give_torchs_bits_in_strided_rows(dtype: torch.dtype) -> None:
    wide, y = randn(300, 60, dtype=dtype), randn(300, 70, dtype=dtype, seed=1)[:, 3:53]
    wide[5, 7] = torch.nan
    wide[6, 8], wide[7, 9] = torch.inf, -torch.inf
    expected = wide.clone()
    expected[:, 2:52] += y
    add_rows(NAMESPACE, wide[:, 2:52], y)
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)
    expected[:, 2:52].clamp_(-0.7, 0.7)
    clamp_rows(NAMESPACE, wide[:, 2:52], 0.7)
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)


def test_opcheck() -> None:
    x = randn(3, 8)
    torch.library.opcheck(torch.ops.pagedllm.finish_logits.default, (x.clone(), 2.0, 3.0))
    torch.library.opcheck(torch.ops.pagedllm.add_rows.default, (x.clone(), x))
    torch.library.opcheck(torch.ops.pagedllm.clamp_rows.default, (x.clone(), 1.0))


def test_wrong_arguments_are_named() -> None:
    x = randn(3, 8)
    with pytest.raises(RuntimeError, match="finish_logits: softcap must be 0 or above, got -1"):
        finish_logits(NAMESPACE, x, 1.0, -1.0)
    with pytest.raises(RuntimeError, match="finish_logits: logits must be float32, got bfloat16"):
        finish_logits(NAMESPACE, x.bfloat16(), 1.0, 0.0)
    with pytest.raises(RuntimeError, match=r"add_rows: y must have shape \[3, 8\]"):
        add_rows(NAMESPACE, x, x[:, :7])
    with pytest.raises(RuntimeError, match="clamp_rows: limit must be above 0, got 0"):
        clamp_rows(NAMESPACE, x, 0.0)
