"""Sampling for CUDA, run by the emulator: tokens and edits equal the twins' bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.sampling import process_logits, sample, top_logprobs
from tests.simt.emulator import Emulator

SIMT = "pagedllm_simt"


def draw_both(logits: Tensor, **settings: object) -> tuple[list[int], list[int]]:
    """Tokens of ours and of the twin; settings are one value for all rows or one a row."""
    num_rows = len(logits)
    defaults: dict[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    dtypes = {"top_k": torch.int32, "seed": torch.int64}
    values = {
        name: torch.tensor(
            value if isinstance(value, list) else [value] * num_rows, dtype=dtypes.get(name, torch.float32)
        )
        for name, value in (defaults | settings).items()
    }
    counter = torch.stack((torch.arange(num_rows) % 3, torch.arange(num_rows) * 17), 1).to(torch.int32)
    arguments = (*(values[name] for name in defaults), counter)
    ours, twins = (torch.full((num_rows,), -9, dtype=torch.int32) for _ in range(2))
    sample(SIMT, ours, logits, *arguments)
    sample.reference(twins, logits, *arguments)
    return ours.tolist(), twins.tolist()


def random_logits(num_rows: int, vocab_size: int, seed: int, decimals: int | None = None) -> Tensor:
    """Of a wider tensor; rounded to few decimals there are many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size + 3, generator=generator)[:, :vocab_size] * 3
    return logits if decimals is None else (logits * 10**decimals).round() / 10**decimals


@pytest.mark.parametrize("vocab_size", [1, 33, 1024, 5003])
@pytest.mark.parametrize("decimals", [None, 0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": [0.3, 1.7, 1e-3, 0.9, 100.0, 0.0]},
        {"top_k": [1, 2, 50, 0, 7, 10**6]},
        {"top_p": [0.1, 0.5, 0.9, 0.999, 1.0, 1e-6]},
        {"min_p": [0.0, 0.05, 0.5, 1.0, 1e-4, 0.2]},
        {"top_k": [50, 3, 20, 1, 0, 5], "top_p": [0.9, 0.4, 1.0, 0.3, 0.8, 0.95], "min_p": 0.01, "temperature": 0.8},
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_equal_the_twins(
    emulator: Emulator, vocab_size: int, decimals: int | None, settings: dict[str, object]
) -> None:
    ours, twins = draw_both(random_logits(6, vocab_size, seed=vocab_size, decimals=decimals), **settings)
    assert ours == twins


@pytest.mark.parametrize("seed", range(12))
def test_random_settings_draw_as_the_twin(emulator: Emulator, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    num_rows, vocab_size = 4, int(torch.randint(2, 3000, (1,), generator=g))
    logits = random_logits(num_rows, vocab_size, seed, decimals=(None, 1, 0)[seed % 3])
    hidden = torch.rand(logits.shape, generator=g) < 0.3
    hidden[:, 0] = False
    logits = logits.masked_fill(hidden, -torch.inf)
    ours, twins = draw_both(
        logits,
        temperature=(torch.rand(num_rows, generator=g) * 2 + 0.05).tolist(),
        top_k=torch.randint(0, 60, (num_rows,), generator=g).tolist(),
        top_p=(torch.rand(num_rows, generator=g) * 0.99 + 0.01).tolist(),
        min_p=(torch.rand(num_rows, generator=g) * 0.1).tolist(),
        seed=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g).tolist(),
    )
    emulator.configure(seed % 3, seed + 1)
    assert ours == twins


def test_greedy_takes_the_lowest_id_of_equal_logits(emulator: Emulator) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [70, 1500, 2999]] = 4.0
    logits[1] = torch.tensor([-0.0, 0.0] * 1500)
    assert draw_both(logits, temperature=0.0)[0] == [70, 0]


def test_rows_without_a_finite_maximum_give_no_token(emulator: Emulator) -> None:
    logits = torch.randn(4, 100)
    logits[0, 50], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    ours, twins = draw_both(logits)
    assert ours == twins
    assert ours[:3] == [-1, -1, -1]


def test_a_row_draws_the_same_token_alone(emulator: Emulator) -> None:
    logits = random_logits(3, 2000, seed=5)
    together, _ = draw_both(logits, top_p=0.9)
    for row in range(3):
        token = torch.empty(1, dtype=torch.int32)
        one = torch.ones(1)
        counter = torch.tensor([[row % 3, row * 17]], dtype=torch.int32)
        sample(
            SIMT, token, logits[row : row + 1], one, torch.zeros(1, dtype=torch.int32), one * 0.9, one * 0,
            torch.tensor([7]), counter,
        )  # fmt: skip
        assert token.item() == together[row]


def edit_lists(num_rows: int, vocab_size: int, g: torch.Generator, distinct: bool) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 40, (num_rows,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    ids = [
        torch.randperm(vocab_size, generator=g)[:n]
        if distinct
        else torch.randint(0, vocab_size, (int(n),), generator=g)
        for n in lengths
    ]
    return offsets, torch.cat(ids).to(torch.int32)


@pytest.mark.parametrize("seed", range(4))
def test_edits_of_logits_equal_the_twins(emulator: Emulator, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    num_rows, vocab_size = 3, 1000 + seed
    logits = random_logits(num_rows, vocab_size, seed)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (num_rows, -(-vocab_size // 32)), generator=g).to(torch.int32)
    bias_offsets, bias_ids = edit_lists(num_rows, vocab_size, g, distinct=seed % 2 == 0)
    bias_values = torch.randn(len(bias_ids), generator=g)
    penalties = torch.rand(num_rows, 3, generator=g) + torch.tensor([0.5, -0.5, -0.5])
    penalty_offsets, penalty_ids = edit_lists(num_rows, vocab_size, g, distinct=True)
    counts = torch.randint(0, 5, (len(penalty_ids),), generator=g).to(torch.int32)
    mask = (bitmask,) if seed != 3 else (None,)
    bias = (bias_offsets, bias_ids, bias_values) if seed != 1 else (None, None, None)
    penalty = (penalties, penalty_offsets, penalty_ids, counts) if seed != 2 else (None, None, None, None)
    twins = logits.clone()
    process_logits.reference(twins, *mask, *bias, *penalty)
    process_logits(SIMT, logits, *mask, *bias, *penalty)
    assert torch.equal(logits, twins)


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("decimals", [None, 0])
def test_top_logprobs_have_the_twins_ids_and_ranks(emulator: Emulator, k: int, decimals: int | None) -> None:
    check_top_logprobs(random_logits(3, 2500, seed=k, decimals=decimals), k)


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 700])
def test_the_whole_vocabulary_is_sorted(emulator: Emulator, vocab_size: int) -> None:
    check_top_logprobs(random_logits(3, vocab_size, seed=vocab_size, decimals=1), vocab_size)


def check_top_logprobs(logits: Tensor, k: int) -> None:
    num_rows = len(logits)
    results = []
    for run in (lambda *args: top_logprobs(SIMT, *args), top_logprobs.reference):
        ids, values = torch.zeros(num_rows, k, dtype=torch.int32), torch.zeros(num_rows, k)
        token_values, ranks = torch.zeros(num_rows), torch.zeros(num_rows, dtype=torch.int32)
        tokens = torch.tensor([0, -1, logits.shape[1] // 2], dtype=torch.int32)
        run(ids, values, token_values, ranks, logits, tokens)
        results.append((ids, values, token_values, ranks))
    ours, twins = results
    assert torch.equal(ours[0], twins[0])
    assert torch.equal(ours[3], twins[3])
    torch.testing.assert_close(ours[2], twins[2], equal_nan=True, rtol=1e-6, atol=2e-6)
    if k:
        expected = logits.double().log_softmax(-1).gather(1, twins[0].long())
        error, own_error = ((values.double() - expected).abs().max() for values in (ours[1], twins[1]))
        assert error <= 2 * own_error + 1e-6


def test_arguments_that_do_not_fit_are_refused_by_name(emulator: Emulator) -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(RuntimeError, match="process_logits: bias_offsets, bias_ids and bias_values go together"):
        process_logits(SIMT, logits, None, torch.zeros(3, dtype=torch.int32), None, None, None, None, None, None)
    with pytest.raises(RuntimeError, match=r"process_logits: bitmask must have shape \[2, 1\]"):
        process_logits(SIMT, logits, torch.zeros(2, 2, dtype=torch.int32), *[None] * 7)
    with pytest.raises(RuntimeError, match="top_ids must have at most vocab_size columns"):
        check_top_logprobs(torch.zeros(3, 4), 5)
