"""Which sequences are attended together, and when that is worth it. Blocks of 16 tokens, tiles of 64, splits of 512."""

from __future__ import annotations

import numpy as np
import pytest

from pagedllm.ops.shared_prefix import SharedRuns, SharingCosts, find_shared_runs

COSTS = SharingCosts(group=4, head_dim=128, num_kv_heads=2, rows_per_item=64, launch_bytes=0)
TILE_BYTES = 64 * 128 * 2 * 2  # K and V
STATE_BYTES = 4 * 130 * 2 * 4  # of a sequence's four rows, stored and read


def tables(*sequences: list[tuple[str, int]]) -> np.ndarray:
    """Each sequence a list of (name, number of blocks); equal names are equal blocks."""
    ids: dict[tuple[str, int], int] = {}
    rows = [
        [ids.setdefault((name, i), len(ids)) for name, count in sequence for i in range(count)]
        for sequence in sequences
    ]
    result = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for target, row in zip(result, rows, strict=True):
        target[: len(row)] = row
    return result


def find(table: np.ndarray, seq_lens: list[int], costs: SharingCosts = COSTS, window: int = 0) -> SharedRuns | None:
    return find_shared_runs(np.arange(len(table)), np.array(seq_lens, np.int32), (table,), 16, costs, window)


def runs_of(found: SharedRuns | None) -> list[tuple[list[int], int, int]]:
    """(sequences, split, tiles)"""
    assert found is not None
    return [
        (sorted(found.members[first : first + count].tolist()), split, tiles)
        for first, count, split, tiles in zip(
            found.first.tolist(), found.count.tolist(), found.split.tolist(), found.tiles.tolist(), strict=True
        )
    ]


def test_a_prefix_is_shared_in_whole_tiles() -> None:
    table = tables([("p", 39), ("a", 1)], [("p", 39), ("b", 2)], [("c", 5)])  # 624 keys: a split and one tile
    assert runs_of(find(table, [630, 650, 80])) == [([0, 1], 0, 8), ([0, 1], 1, 1)]


def test_a_prefix_of_all_and_longer_ones_of_some_are_each_read_once() -> None:
    table = tables(
        [("p", 32), ("x", 8), ("a", 1)], [("p", 32), ("y", 8), ("b", 1)], [("p", 32), ("x", 8), ("c", 1)],
        [("p", 32), ("y", 8), ("d", 1)], [("p", 32), ("e", 1)],
    )  # fmt: skip
    found = find(table, [650, 650, 650, 650, 520])
    assert sorted(runs_of(found)) == [([0, 1, 2, 3, 4], 0, 8), ([0, 2], 1, 2), ([1, 3], 1, 2)]


def test_the_last_key_is_never_shared() -> None:
    table = tables([("p", 4)], [("p", 4)], [("p", 4)])
    assert find(table, [64, 64, 64]) is None
    assert find(table, [63, 63, 63]) is None
    table = tables([("p", 4), ("a", 1)], [("p", 4), ("b", 1)])
    assert runs_of(find(table, [65, 65])) == [([0, 1], 0, 1)]


def test_few_with_more_in_common_do_not_split_a_large_group() -> None:
    """Seven tiles of two sequences would save less than six tiles of all."""
    sequences = [
        [("p", 24), ("q", 4), (name, 1)] if i < 2 else [("p", 24), (name, 1)] for i, name in enumerate("abcdef")
    ]
    found = find(tables(*sequences), [460, 460, *[390] * 4])
    assert runs_of(found) == [([0, 1, 2, 3, 4, 5], 0, 6)]


def test_equal_blocks_after_different_ones_are_not_a_prefix() -> None:
    """Somebody computed the beginning twice; a split's blocks must all be equal."""
    table = tables([("p", 4), ("q", 4), ("a", 1)], [("r", 4), ("q", 4), ("b", 1)])
    assert find(table, [130, 130]) is None


def test_what_a_window_hides_is_neither_shared_nor_compared() -> None:
    """Of the last 200 keys: from 473, 480 and 620 on, say. Tables name anything before that."""
    table = tables(
        [("x", 27), ("p", 15), ("a", 1)], [("y", 28), ("p", 14), ("b", 3)], [("z", 38), ("p", 4), ("c", 10)],
    )  # fmt: skip
    table[1, 28:42] = table[0, 28:42]
    table[2, 38:42] = table[0, 38:42]
    assert find(table, [673, 680, 820]) is None
    assert runs_of(find(table, [673, 680, 820], window=200)) == [([0, 1], 0, 8), ([0, 1, 2], 1, 2)]
    assert runs_of(find(table, [640, 650, 840], window=200)) == [([0, 1], 0, 8), ([0, 1], 1, 1)]


def test_windows_are_counted_where_they_begin_in_a_shared_tile() -> None:
    counts = np.array([3])
    gains = COSTS.saved_bytes(counts, 8, hidden=np.array([2 + 2 + 5]), least_hidden=np.array([2]))
    assert gains.tolist() == [(6 + 6 + 3 - 6) * TILE_BYTES]


def test_a_late_window_shares_splits_that_others_do_not_see() -> None:
    table = tables([("p", 1), ("a", 2)], [("p", 1), ("b", 2)], [("q", 80), ("c", 1)], [("q", 80), ("d", 1)])
    assert runs_of(find(table, [40, 41, 1285, 1286], window=100)) == [([2, 3], 2, 4)]


def test_all_kv_groups_must_agree() -> None:
    table = tables([("p", 8), ("a", 1)], [("p", 8), ("b", 1)])
    other = tables([("p", 4), ("q", 5)], [("p", 4), ("r", 5)])
    found = find_shared_runs(np.arange(2), np.array([130, 130], np.int32), (table, other), 16, COSTS)
    assert runs_of(found) == [([0, 1], 0, 1)]


def test_what_is_saved_is_counted_in_bytes() -> None:
    counts = np.array([2, 16, 17, 64])  # 8, 64, 68, 256 rows: 1, 1, 2, 4 items
    whole = COSTS.saved_bytes(counts, 8)
    assert whole.tolist() == [(n - items) * 8 * TILE_BYTES for n, items in ((2, 1), (16, 1), (17, 2), (64, 4))]
    assert (COSTS.saved_bytes(counts, 3) == whole // 8 * 3 - counts * STATE_BYTES).all()


@pytest.mark.parametrize("is_enough", [True, False])
def test_nothing_is_shared_unless_it_saves_a_launch(is_enough: bool) -> None:
    saved = 2 * (TILE_BYTES - 2 * STATE_BYTES)  # for two KV heads
    costs = SharingCosts(4, 128, 2, 64, launch_bytes=saved + (not is_enough))
    table = tables([("p", 4), ("a", 1)], [("p", 4), ("b", 1)])
    assert (find(table, [70, 70], costs) is not None) == is_enough
