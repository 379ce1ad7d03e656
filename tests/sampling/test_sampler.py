"""The sampler on the twins: parameters act in their order, rows are independent, draws are keyed by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedllm.engine.scheduler_output import NewRequestData
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.processors import PenaltyCounts
from pagedllm.sampling.sampler import Sampler, SamplerOutput
from pagedllm.sampling_params import SamplingParams

VOCAB = 100
NAMESPACE = "pagedllm_reference"


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seeds: list[int] | None = None,
    eos: tuple[int, ...] = (),
) -> SamplerOutput:
    """One step in which every request has this prompt and output so far."""
    prompt, output = prompt or [1, 2, 3], output or []
    rows = SamplingRows(len(params), VOCAB)
    token_ids = np.array(prompt + output, np.int32)
    for row, p in enumerate(params):
        seed = (seeds or [row] * len(params))[row]
        rows.set(row, NewRequestData(len(prompt), p, seed, eos), token_ids)
    sampler = Sampler(NAMESPACE, VOCAB, rows)
    positions = np.full(len(params), len(output), np.int32)
    return sampler.sample(logits.clone(), np.arange(len(params)), positions, np.zeros(len(params), np.int32))


def flat_logits(num_rows: int, **peaks: float) -> torch.Tensor:
    logits = torch.zeros(num_rows, VOCAB)
    for name, value in peaks.items():
        logits[:, int(name[1:])] = value
    return logits


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert draw(flat_logits(1, t7=3.0, t40=3.0), [SamplingParams(temperature=0)]).token_ids == [7]


@pytest.mark.parametrize(
    ("params", "needs_logits"),
    [
        ({}, False),
        ({"top_p": 0.5, "top_k": 3, "seed": 7, "min_tokens": 0, "stop_token_ids": [5]}, False),
        ({"temperature": 1e-6}, False),
        ({"temperature": 0.5}, True),
        ({"logprobs": 0}, True),
        ({"min_tokens": 2, "stop_token_ids": [5]}, True),
        ({"logit_bias": {4: 1.0}}, True),
        ({"allowed_token_ids": [4]}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logits_processors": [lambda token_ids, logits: logits]}, True),
    ],
)
def test_rows_that_want_their_likeliest_token_and_nothing_else_need_no_logits(
    params: dict[str, Any], needs_logits: bool
) -> None:
    rows = SamplingRows(2, VOCAB)
    for row in (0, 1):  # whatever the row held before
        rows.set(row, NewRequestData(1, SamplingParams(temperature=0.7 * row), row), np.array([1], np.int32))
        rows.set(row, NewRequestData(1, SamplingParams(**{"temperature": 0, **params}), 0), np.array([1], np.int32))
    assert rows.needs_logits.tolist() == [needs_logits] * 2


def test_temperatures_below_the_greedy_limit_are_greedy() -> None:
    params = [SamplingParams(temperature=t) for t in (0, 9e-6, 1e-30, 5e-324)]
    assert draw(flat_logits(4, t7=0.001), params).token_ids == [7] * 4


def test_repetition_penalty_sees_the_prompt_and_the_others_only_the_output() -> None:
    logits = flat_logits(1, t3=1.0, t9=0.9)
    greedy = {"temperature": 0.0}
    assert draw(logits, [SamplingParams(**greedy)]).token_ids == [3]
    assert draw(logits, [SamplingParams(**greedy, repetition_penalty=1.5)]).token_ids == [9]
    assert draw(logits, [SamplingParams(**greedy, presence_penalty=1.0)]).token_ids == [3]
    assert draw(logits, [SamplingParams(**greedy, presence_penalty=1.0)], output=[3]).token_ids == [9]
    assert draw(logits, [SamplingParams(**greedy, frequency_penalty=0.06)], output=[3]).token_ids == [3]
    assert draw(logits, [SamplingParams(**greedy, frequency_penalty=0.06)], output=[3, 3]).token_ids == [9]


def test_repetition_penalty_multiplies_negative_logits() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 3], logits[0, 9] = -1.0, -1.4
    assert draw(logits, [SamplingParams(temperature=0, repetition_penalty=1.5)]).token_ids == [9]


def test_logit_bias_is_clamped_and_applied_after_the_mask() -> None:
    logits = flat_logits(1, t7=150.0)
    assert draw(logits, [SamplingParams(temperature=0, logit_bias={5: 1000.0})]).token_ids == [7]
    assert draw(logits, [SamplingParams(temperature=0, logit_bias={5: 200.0, 7: -60.0})]).token_ids == [5]
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 4], logit_bias={5: 50.0, 4: 1.0})
    assert draw(logits, [params]).token_ids == [4]


def test_min_tokens_holds_back_eos_and_stop_ids_until_reached() -> None:
    logits = flat_logits(1, t7=3.0, t8=2.0, t9=1.0)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8])
    assert draw(logits, [params], eos=(7,)).token_ids == [9]
    assert draw(logits, [params], output=[9], eos=(7,)).token_ids == [9]
    assert draw(logits, [params], output=[9, 9], eos=(7,)).token_ids == [7]


def test_min_tokens_with_ignore_eos_and_no_stop_ids_holds_nothing_back() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert draw(flat_logits(1, t7=3.0), [params], eos=(7,)).token_ids == [7]


def test_a_row_of_nan_fails_alone() -> None:
    logits = flat_logits(3, t7=3.0)
    logits[1, 50] = torch.nan
    output = draw(logits, [SamplingParams(temperature=0, logprobs=0)] * 3)
    assert output.token_ids == [7, -1, 7]
    assert output.logprobs is not None
    assert output.logprobs[1] is None


def test_each_row_draws_as_it_would_alone() -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(allowed_token_ids=[5, 6, 7], logprobs=2),
        SamplingParams(logit_bias={9: 4.0}, min_p=0.1),
        SamplingParams(top_k=3, presence_penalty=0.5, frequency_penalty=-0.5, logprobs=0),
    ]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(0))
    seeds = [11, 22, 33, 44, 55, 66]
    together = draw(logits, params, output=[4, 4, 5], seeds=seeds)
    assert together.logprobs is not None
    for row, p in enumerate(params):
        alone = draw(logits[row : row + 1], [p], output=[4, 4, 5], seeds=[seeds[row]])
        assert alone.token_ids == [together.token_ids[row]]
        if p.logprobs is not None:
            assert alone.logprobs is not None
            mine, theirs = alone.logprobs[0], together.logprobs[row]
            assert mine is not None
            assert theirs is not None
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_the_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.zeros(64, VOCAB)
    params = [SamplingParams()] * 64
    first = draw(logits, params, seeds=list(range(64))).token_ids
    assert first == draw(logits, params, seeds=list(range(64))).token_ids
    assert first == draw(logits.flip(0), params, seeds=list(range(64))[::-1]).token_ids[::-1]
    assert first != draw(logits, params, seeds=list(range(64)), output=[1]).token_ids
    assert len(set(first)) > 30


def test_logprobs_are_of_the_raw_logits_with_the_sampled_token_first() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0, allowed_token_ids=[40], logprobs=3)
    output = draw(logits, [params])
    assert output.token_ids == [40]
    assert output.logprobs is not None
    entry = output.logprobs[0]
    assert entry is not None
    reference = logits.double().log_softmax(-1)[0]
    order = logits[0].argsort(descending=True)
    assert entry.token_ids.tolist() == [40, *order[:3].tolist()]
    assert entry.sampled_rank == 1 + int((logits[0] > logits[0, 40]).sum())
    torch.testing.assert_close(torch.from_numpy(entry.logprobs).double(), reference[entry.token_ids], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("wanted", "entries"), [(0, 1), (5, 6), (-1, VOCAB + 1)])
def test_number_of_logprobs_is_what_was_asked_for(wanted: int, entries: int) -> None:
    output = draw(flat_logits(1, t7=3.0), [SamplingParams(temperature=0, logprobs=wanted)])
    assert output.logprobs is not None
    assert output.logprobs[0] is not None
    assert len(output.logprobs[0].token_ids) == entries


def test_penalty_counts_grow_past_their_first_room() -> None:
    counts = PenaltyCounts(np.array([5, 5, 9], np.int32), num_prompt_tokens=2)
    for token_id in [*range(200), 9]:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {**dict.fromkeys(range(200), 1), 9: 3}
