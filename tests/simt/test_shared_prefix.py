"""Decodes that have blocks in common are attended together: equal bits, fewer bytes. Run by the emulator."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tests.simt.attention_case import AttentionCase, Batch, make_batch, make_metadata, relative_error
from tests.simt.emulator import Emulator


def random_case(seed: int) -> AttentionCase:
    """Trees of prefixes: each sequence begins like an earlier one, as far as that goes; some are prompts."""
    r = random.Random(seed)
    block_size = r.choice((8, 16, 32, 64, 128))
    group, num_kv_heads = r.choice(((1, 2), (2, 1), (4, 2), (7, 1), (16, 1)))
    q_lens, seq_lens, prefixes = [], [], []
    for seq in range(r.randint(3, 8)):
        source = r.randrange(seq) if seq else 0
        length = seq_lens[source] if seq else r.choice((90, 200, 480, 600, 1100))
        shared = r.choice((length, length, r.randint(0, length))) // block_size * block_size if seq else 0
        num_new = r.choice((1,) * 7 + (5,))
        q_lens.append(num_new)
        seq_lens.append(shared + num_new + r.randint(0, 90))
        prefixes.append((source, shared))
    return AttentionCase(
        tuple(q_lens), tuple(seq_lens), num_kv_heads * group, num_kv_heads,
        head_dim=r.choice((64, 64, 80, 128, 256)), block_size=block_size,
        dtype=r.choice((torch.bfloat16, torch.float16)), softcap=r.choice((0.0, 30.0)),
        window=r.choice((0, 0, r.randint(1, 600))), has_sinks=r.random() < 0.3, deterministic=r.random() < 0.8,
        seed=seed, prefixes=tuple(prefixes),
    )  # fmt: skip


def together(batch: Batch) -> Batch:
    case = dataclasses.replace(batch.case, is_shared=True)
    metadata = make_metadata(case, batch.metadata.block_tables[0])
    return Batch(case, batch.q, batch.kv_cache, metadata, batch.sinks)


def num_shared_items(batch: Batch) -> int:
    return int((batch.metadata.work[0][1:, 7] == 4).sum())


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_trees_of_prefixes_give_equal_bits_attended_together_or_not(emulator: Emulator, first: int) -> None:
    num_shared = 0
    for seed in range(first, first + 20):
        batch = make_batch(random_case(seed))
        emulator.configure(order=seed % 3, seed=seed + 1)
        shared = together(batch)
        num_shared += num_shared_items(shared)
        assert torch.equal(shared.attend(), batch.attend()), batch.case
    assert num_shared > 5


PREFIX = 640  # a whole split and two tiles


def case_with_prefix(num_seqs: int, **changes: object) -> AttentionCase:
    """Decodes with a common prefix and 1 to 30 keys of their own, and one that has nothing in common."""
    r = random.Random(1)
    own = [r.randint(1, 30) for _ in range(num_seqs)]
    case = AttentionCase(
        (1,) * (num_seqs + 1),
        (*(PREFIX + n for n in own), 77),
        8,
        2,
        prefixes=((0, 0), *((0, PREFIX),) * (num_seqs - 1), (0, 0)),
    )
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_common_prefix_is_read_once_for_each_tall_item(emulator: Emulator, head_dim: int) -> None:
    num_seqs = 33  # 132 rows: three items
    batch = together(make_batch(case_with_prefix(num_seqs, head_dim=head_dim)))
    keys = sum(batch.case.seq_lens) - (num_seqs - 3) * PREFIX
    before = emulator.counters()
    emulator.profile_begin()
    assert relative_error(batch.attend(), batch.expected()) < 5e-3
    lines = emulator.profile_end()
    after = emulator.counters()
    minimum = keys * batch.case.num_kv_heads * head_dim * 2
    for cache in ("k_cache", "v_cache"):
        assert emulator.traffic()[cache].bytes_read == minimum
    assert minimum < sum(batch.case.seq_lens) * batch.case.num_kv_heads * head_dim * 2 / 8
    loads = after["load_matrix"] - before["load_matrix"]
    assert after["load_matrix_wavefronts"] - before["load_matrix_wavefronts"] == 4 * loads
    assert [line for line in lines if line.kind.startswith("shared") and line.units > line.ideal] == []


def test_a_window_hides_shared_keys_from_those_that_are_past_them(emulator: Emulator) -> None:
    """The windows of some begin within the prefix, of some after it, of some before."""
    case = case_with_prefix(6, window=150)
    lengths = (PREFIX + 1, PREFIX + 149, PREFIX + 150, PREFIX + 151, PREFIX + 400, 40 + PREFIX, 77)
    batch = make_batch(dataclasses.replace(case, seq_lens=lengths))
    shared = together(batch)
    assert num_shared_items(shared) == 1  # of the second split: only the first sequence sees some of the first one
    assert sorted(shared.metadata.merge[0][1:4, 0].tolist()) == [0, 1, 5]
    assert torch.equal(shared.attend(), batch.attend())
    assert relative_error(shared.out, batch.expected()) < 5e-3


def test_keys_are_read_through_the_table_of_the_shortest(emulator: Emulator) -> None:
    """Other tables name blocks of NaN where their windows do not reach."""
    case = case_with_prefix(6, window=400)
    batch = make_batch(dataclasses.replace(case, seq_lens=(900, 850, 800, 690, 750, 660, 77)))
    shared = together(batch)
    items = shared.metadata.work[0][1:]
    assert items[items[:, 7] == 4, 6].tolist() == [5, 5]
    assert torch.equal(shared.attend(), batch.attend())
    assert relative_error(shared.out, batch.expected()) < 5e-3


def test_what_is_shared_need_not_lie_side_by_side_in_the_batch(emulator: Emulator) -> None:
    lengths = (300, 310, 320, 330, 340)
    batch = make_batch(AttentionCase((1,) * 5, lengths, prefixes=((0, 0), (0, 0), (0, 256), (1, 256), (0, 256))))
    shared = together(batch)
    assert shared.metadata.merge[0][:6, 0].tolist() in ([5, 0, 2, 4, 1, 3], [5, 1, 3, 0, 2, 4])
    assert torch.equal(shared.attend(), batch.attend())


def test_a_captured_step_serves_batches_with_shared_items_and_without(emulator: Emulator) -> None:
    """A merge list with more places than sequences makes the launcher start the kernel of 64 rows too."""
    batch = make_batch(case_with_prefix(3))
    plans = (together(batch).metadata, batch.metadata)
    expected = batch.attend().clone()
    static = Batch(
        batch.case,
        batch.q,
        batch.kv_cache,
        dataclasses.replace(
            batch.metadata,
            work=(torch.zeros(16, 8, dtype=torch.int32),),
            merge=(torch.zeros(6, 4, dtype=torch.int32),),
            workspace=torch.zeros(max(plan.workspace.numel() for plan in plans)),
        ),
        batch.sinks,
    )
    emulator.capture_begin()
    static.attend()
    assert len(emulator.capture_end()) == 3  # items of 64 and of 16 rows, merge
    for plan in (*plans, plans[0]):
        static.metadata.work[0][: len(plan.work[0])] = plan.work[0]
        static.metadata.merge[0][: len(plan.merge[0])] = plan.merge[0]
        static.out.zero_()
        emulator.replay()
        assert torch.equal(static.out, expected)
