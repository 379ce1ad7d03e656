"""process_logits, sample and top_logprobs: compiled kernels against their twins, and draws equal id for id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedllm.ops.library import load_kernels
from pagedllm.ops.sampling import EXP2_COEFFICIENTS, exp2_weight, process_logits, random_bits, sample, top_logprobs

NAMESPACE = load_kernels().namespace


def draw(
    logits: Tensor, namespace: str = NAMESPACE, seeds: list[int] | None = None, **settings: float | list[float]
) -> list[int]:
    """Tokens of all rows; a setting is one value for all rows or a list."""
    num_rows = len(logits)

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        value = settings.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    token_ids = torch.full((num_rows,), -7, dtype=torch.int32)
    counter = torch.stack((torch.arange(num_rows) % 3, torch.arange(num_rows)), 1).int()
    sample(
        namespace, token_ids, logits, column("temperature", 1.0, torch.float32), column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32), column("min_p", 0.0, torch.float32),
        torch.tensor(seeds or [7] * num_rows), counter,
    )  # fmt: skip
    return token_ids.tolist()


def random_rows(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows as models and edits make them: smooth, with many ties, masked, flat, peaked, with zeros of both signs."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    logits[1::8] = logits[1::8].round()  # ties
    logits[2::8] = torch.where(torch.rand(logits[2::8].shape, generator=generator) < 0.97, -torch.inf, logits[2::8])
    logits[2::8, vocab_size // 2] = 0.5  # something stays above -inf
    logits[3::8] *= 1e-3  # flat
    logits[4::8] *= 10  # peaked
    logits[5::8] = torch.where(logits[5::8] > 0, 0.0, -0.0)
    logits[6::8] = logits[6::8].bfloat16().float()
    return logits


def random_settings(num_rows: int, vocab_size: int, rng: np.random.Generator) -> dict[str, list[float]]:
    top_ks = [0, 0, 1, 2, 50, vocab_size - 1, vocab_size, vocab_size + 9, 2**31 - 1]
    return {
        "temperature": rng.choice([0, 1e-38, 1e-5, 1e-2, 0.3, 0.8, 1.0, 2.0, 50.0], num_rows).tolist(),
        "top_k": rng.choice(top_ks, num_rows).tolist(),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.999999, 1e-6, 0.0], num_rows).tolist(),
        "min_p": rng.choice([0.0, 0.0, 0.0, 0.05, 0.3, 1e-9, 1.0], num_rows).tolist(),
    }


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(1, 40), (3, 200), (33, 2000), (256, 2000), (1000, 3000), (5003, 400), (49152, 40)]
)
def test_tokens_equal_the_twins(vocab_size: int, num_rows: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_rows(num_rows, vocab_size, torch.Generator().manual_seed(vocab_size))
    settings = random_settings(num_rows, vocab_size, rng)
    seeds = rng.integers(-(2**63), 2**63, num_rows).tolist()
    before = logits.clone()
    tokens = draw(logits, seeds=seeds, **settings)
    expected = draw(logits, "pagedllm_reference", seeds=seeds, **settings)
    assert tokens == expected
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_a_flat_row_whose_top_p_keeps_most_of_the_vocabulary_equals_the_twin(top_p: float) -> None:
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(5)) * 0.1
    settings = {"top_p": top_p, "min_p": [0.0, 0.0, 0.9, 0.99]}
    assert draw(logits, **settings) == draw(logits, "pagedllm_reference", **settings)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 700)
    logits[0, [300, 299, 650]] = 2.0
    logits[1] = -0.0
    logits[1, 400:] = 0.0  # equal to -0
    logits[2, 699] = 1e-45
    assert draw(logits, temperature=0.0) == [299, 0, 699]


def test_rows_that_are_not_finite_give_minus_one_and_leave_others_alone() -> None:
    logits = torch.zeros(6, 300)
    logits[:, 7] = 50.0
    logits[1, 299] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    for settings in ({"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {}):
        assert draw(logits, **settings) == [7, -1, -1, -1, -1, 7]


def test_min_p_of_one_keeps_the_largest_logits_only() -> None:
    logits = torch.zeros(200, 50)
    logits[:, [20, 30]] = 1.0
    assert set(draw(logits, min_p=1.0)) == {20, 30}


def test_top_k_keeps_ties_of_low_ids() -> None:
    logits = torch.zeros(300, 64)
    logits[:, 60] = 1.0
    assert set(draw(logits, top_k=3)) == {0, 1, 60}


def test_top_p_keeps_the_shortest_run_that_reaches_it() -> None:
    logits = torch.full((400, 4), -torch.inf)
    logits[:, :4] = torch.tensor([0.125, 0.5, 0.25, 0.125]).log2() * np.log(2)
    assert set(draw(logits, top_p=0.5)) == {1}
    assert set(draw(logits, top_p=0.7)) == {1, 2}
    assert set(draw(logits, top_p=0.8)) == {0, 1, 2}


def test_frequencies_are_those_of_the_softmax() -> None:
    num_rows = 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]).repeat(num_rows, 1)
    counts = np.bincount(draw(logits, temperature=0.7), minlength=5)
    expected = torch.softmax(logits[0].double() / 0.7, 0).numpy() * num_rows
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-squared, 4 degrees of freedom: 99.9 %


def test_a_draw_depends_on_seed_sample_index_and_position_only() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(9, 1000, generator=torch.Generator().manual_seed(2))

    def token(rows: Tensor, at: int, seed: int, counter: tuple[int, int]) -> int:
        n = len(rows)
        token_ids = torch.zeros(n, dtype=torch.int32)
        counters, seeds = torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
        counters[at], seeds[at] = torch.tensor(counter), seed
        off = torch.zeros(n, dtype=torch.int32)
        sample(NAMESPACE, token_ids, rows, torch.ones(n), off, torch.ones(n), torch.zeros(n), seeds, counters)
        return int(token_ids[at])

    alone = token(logits, 0, 42, (0, 5))
    assert token(torch.cat((noise, logits)), 9, 42, (0, 5)) == alone
    others = {token(logits, 0, seed, counter) for seed, counter in [(43, (0, 5)), (42, (1, 5)), (42, (0, 6))]}
    assert len(others | {alone}) == 4


def test_the_random_bits_are_philox_4x32_10() -> None:
    # known answer of the Random123 distribution for a counter and a key of zeros: 6627e8d5 e169c58d ...
    assert random_bits(0, 0, 0) == 0xE169C58D_6627E8D5


def test_rows_of_any_stride_and_any_number_of_threads_give_the_same_tokens() -> None:
    wide = torch.randn(40, 1100, generator=torch.Generator().manual_seed(3))
    view = wide[:, 50:1050]
    expected = draw(view.contiguous(), temperature=0.8, top_k=20)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert draw(view, temperature=0.8, top_k=20) == expected
    finally:
        torch.set_num_threads(num_threads)


def test_exp2_weight_is_close_to_exp() -> None:
    logits = -torch.linspace(0, 15, 5000)
    expected = 2.0**32 * torch.exp(logits.double() / 0.7)
    error = (exp2_weight(logits, 0.7) - expected).abs()
    assert (error <= 0.5 + 2.5e-6 * expected).all()  # float32 z / t: up to 31 * 2^-24 in the exponent
    assert len(EXP2_COEFFICIENTS) == 6


# ---- process_logits


def ragged(parts: list[list[tuple[int, float]]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts])], dtype=torch.int32)
    flat = [entry for part in parts for entry in part]
    ids, values = torch.tensor([i for i, _ in flat], dtype=torch.int32), torch.tensor([v for _, v in flat], dtype=dtype)
    return offsets, ids, values


def test_edits_equal_the_twins_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    num_rows, vocab_size = 24, 1003
    logits = random_rows(num_rows, vocab_size, torch.Generator().manual_seed(0))
    bitmask = torch.from_numpy(rng.integers(-(2**31), 2**31, (num_rows, 32), np.int64).astype(np.int32))
    bias = ragged(
        [[(int(i), rng.normal()) for i in rng.integers(0, vocab_size, rng.integers(0, 20))] for _ in range(num_rows)],
        torch.float32,
    )
    counts = ragged(
        [
            [(int(i), int(rng.integers(0, 4))) for i in rng.choice(vocab_size, rng.integers(0, 200), replace=False)]
            for _ in range(num_rows)
        ],
        torch.int32,
    )
    penalties = torch.from_numpy(rng.uniform(0.1, 2.0, (num_rows, 3)).astype(np.float32))
    for has_mask in (False, True):
        for has_bias in (False, True):
            for has_penalties in (False, True):
                edits = (
                    bitmask if has_mask else None,
                    *(bias if has_bias else (None,) * 3),
                    *((penalties, *counts) if has_penalties else (None,) * 4),
                )
                ours, twins = logits.clone(), logits.clone()
                process_logits(NAMESPACE, ours, *edits)
                process_logits("pagedllm_reference", twins, *edits)
                assert torch.equal(ours.view(torch.int32), twins.view(torch.int32))


def test_penalties_follow_their_definition() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0]])
    penalties = torch.tensor([[2.0, 0.5, 0.25]])  # repetition, presence, frequency
    offsets, ids, counts = ragged([[(0, 0), (1, 2), (2, 1)]], torch.int32)  # token 0 stands in the prompt only
    process_logits(NAMESPACE, logits, None, None, None, None, penalties, offsets, ids, counts)
    assert logits.tolist() == [[1.0, -5.0, 0.25, 1.0]]


# ---- top_logprobs


def logprobs(
    logits: Tensor, token_ids: list[int], k: int, namespace: str = NAMESPACE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = len(logits)
    out = (
        torch.full((n, k), -9, dtype=torch.int32), torch.full((n, k), -9.0),
        torch.full((n,), -9.0), torch.full((n,), -9, dtype=torch.int32),
    )  # fmt: skip
    top_logprobs(namespace, *out, logits, torch.tensor(token_ids, dtype=torch.int32))
    return out


@pytest.mark.parametrize(
    ("vocab_size", "k"), [(1, 1), (33, 5), (700, 0), (700, 1), (1003, 20), (1003, 1003), (9000, 100)]
)
def test_logprobs_have_the_twins_order_and_float64s_values(vocab_size: int, k: int) -> None:
    logits = random_rows(40, vocab_size, torch.Generator().manual_seed(k))
    token_ids = [(i * 7) % vocab_size if i % 5 else -1 for i in range(40)]
    top_ids, top_values, token_values, token_ranks = logprobs(logits, token_ids, k)
    expected = logprobs(logits, token_ids, k, "pagedllm_reference")
    assert torch.equal(top_ids, expected[0])
    assert torch.equal(token_ranks, expected[3])
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(top_values.double(), exact.gather(1, top_ids.long()), rtol=3e-7, atol=2e-7)
    for row, (token_id, value) in enumerate(zip(token_ids, token_values.tolist(), strict=True)):
        if token_id < 0:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(float(exact[row, token_id]), rel=3e-7, abs=2e-7)


def test_logprobs_of_a_row_with_nan_are_nan_and_its_neighbours_are_untouched() -> None:
    logits = random_rows(3, 600, torch.Generator().manual_seed(0))
    expected = logprobs(logits, [1, 2, 3], 4)
    logits[1, 300] = torch.nan
    top_ids, top_values, token_values, _ = logprobs(logits, [1, 2, 3], 4)
    assert top_values[1].isnan().all()
    assert token_values[1].isnan()
    assert torch.equal(top_ids[::2], expected[0][::2])
    assert torch.equal(top_values[::2], expected[1][::2])


def test_logprobs_have_the_same_bits_alone_and_in_a_batch() -> None:
    logits = random_rows(16, 5003, torch.Generator().manual_seed(9))
    batch = logprobs(logits, list(range(16)), 7)
    for row in range(16):
        alone = logprobs(logits[row : row + 1].clone(), [row], 7)
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(batch, alone, strict=True))


# ---- refusals, registration


def test_wrong_arguments_are_refused_by_name() -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(RuntimeError, match=r"sample: temperature must be finite and >= 0, got -1"):
        draw(logits, temperature=-1.0)
    with pytest.raises(RuntimeError, match=r"sample: min_p must be in 0 \.\. 1, got 2"):
        draw(logits, min_p=2.0)
    with pytest.raises(RuntimeError, match=r"sample: logits must be float32, got float64"):
        draw(logits.double())
    with pytest.raises(RuntimeError, match=r"top_logprobs: token_ids must be in -1 \.\. 9, got 10"):
        logprobs(logits, [0, 10], 1)
    with pytest.raises(RuntimeError, match=r"top_logprobs: top_ids must have at most 10 columns"):
        logprobs(logits, [0, 1], 11)
    with pytest.raises(RuntimeError, match=r"process_logits: bias_ids must be in 0 \.\. 9, got 11"):
        process_logits(NAMESPACE, logits, None, *ragged([[(11, 1.0)], []], torch.float32), None, None, None, None)
    bad_offsets = torch.tensor([0, 3, 1], dtype=torch.int32)
    ids, values = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"process_logits: bias_offsets must ascend within 0 \.\. 1"):
        process_logits(NAMESPACE, logits, None, bad_offsets, ids, values, None, None, None, None)
    with pytest.raises(RuntimeError, match=r"bias_offsets and bias_ids must be given with their values"):
        process_logits(NAMESPACE, logits, None, None, None, values, None, None, None, None)


def test_opcheck() -> None:
    n = 3
    logits = torch.randn(n, 40, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(n, dtype=torch.int32)
    counters, seeds = torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    ops = getattr(torch.ops, NAMESPACE)
    checks = ("test_schema", "test_faketensor")
    settings = (torch.ones(n), ids.clone(), torch.ones(n), torch.zeros(n))
    torch.library.opcheck(ops.sample.default, (ids.clone(), logits, *settings, seeds, counters), test_utils=checks)
    out = (torch.zeros(n, 4, dtype=torch.int32), torch.zeros(n, 4), torch.zeros(n), ids.clone())
    torch.library.opcheck(ops.top_logprobs.default, (*out, logits, ids), test_utils=checks)
    mask = torch.full((n, 2), -1, dtype=torch.int32)
    torch.library.opcheck(ops.process_logits.default, (logits.clone(), mask, *(None,) * 7), test_utils=checks)
