"""Batches that fill a GPU: more items than it has places for, long tables, the vocabularies of today. Emulated, they
are a small part of that."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import torch

from tests.simt.attention_case import AttentionCase, make_batch, relative_error
from tests.simt.emulator import Emulator
from tests.simt.test_attention import rebatch, split_by_sequence
from tests.simt.test_sampling import check_top_logprobs, draw_both, random_logits
from tests.simt.test_shared_prefix import num_shared_items, together


@pytest.fixture
def part(pytestconfig: pytest.Config) -> int:
    """By which sizes are divided."""
    if pytestconfig.getoption("operators_on") != "cuda":
        return 24
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the expected values are 100 GFLOP of float64
    return 1


LOADS = {
    "decodes": AttentionCase((), (), 32, 8, head_dim=128),
    "decodes without groups": AttentionCase((), (), 8, 8, head_dim=64, block_size=32),
    "decodes in groups of 8": AttentionCase((), (), 16, 2, head_dim=128, dtype=torch.float16),
    "everything": AttentionCase((), (), 8, 2, head_dim=64, window=700, softcap=30.0, has_sinks=True),
}


def loaded(case: AttentionCase, part: int, num_prompts: int) -> AttentionCase:
    r = random.Random(0)
    prompts = [r.randint(300, 2000) // part for _ in range(num_prompts)]
    lengths = [r.randint(1, 3000) // part + 1 for _ in range(72 // part)]
    q_lens = (*prompts, *(1 for _ in lengths))
    seq_lens = (*(n + r.choice((0, 500 // part)) for n in prompts), *lengths)
    return dataclasses.replace(case, q_lens=q_lens, seq_lens=seq_lens)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("num_prompts", [0, 3])
def test_attention_is_exact_and_a_sequence_has_the_same_bits_alone(
    emulator: Emulator, part: int, name: str, num_prompts: int
) -> None:
    batch = make_batch(loaded(LOADS[name], part, num_prompts))
    assert relative_error(batch.attend(), batch.expected()) < 5e-3
    outputs = split_by_sequence(batch.out, batch.case.q_lens)
    for seq in (0, len(outputs) - 1):
        alone = rebatch(batch, [seq], [slice(None)], [batch.case.seq_lens[seq]]).attend()
        assert torch.equal(alone, outputs[seq]), f"sequence {seq}"


def test_many_decodes_share_a_prefix(emulator: Emulator, part: int) -> None:
    r = random.Random(1)
    num_seqs, prefix = 96 // part, 3072 // part
    own = [r.randint(1, 400) // part + 1 for _ in range(num_seqs)]
    prefixes = ((0, 0), *((0, prefix),) * (num_seqs - 1))
    case = AttentionCase((1,) * num_seqs, tuple(prefix + n for n in own), 16, 4, head_dim=128, prefixes=prefixes)
    batch = make_batch(case)
    shared = together(batch)
    assert num_shared_items(shared) > 0
    assert torch.equal(shared.attend(), batch.attend())
    assert relative_error(shared.out, batch.expected()) < 5e-3


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50}])
def test_draws_from_a_large_vocabulary_equal_the_twins(
    emulator: Emulator, part: int, settings: dict[str, object]
) -> None:
    ours, twins = draw_both(random_logits(96 // part, 151_936 // part, seed=9), **settings)
    assert ours == twins


def test_logprobs_of_a_large_vocabulary_equal_the_twins(emulator: Emulator, part: int) -> None:
    check_top_logprobs(random_logits(3, 151_936 // part, seed=3), 20)
