"""The CUDA backend's work list: which block of threads attends which rows over which keys.

Kernels exist for items of 128, 64 and 16 packed rows (128 up to head_dim 128). A row's bits do not depend on the item
it falls into, so the choice is free: full items first, the rest of a sequence in the smallest that holds it.

A tile of rows that sees more than one split of 512 keys is cut in one of two ways, with equal bits:

    parallel   an item for each split; partial results go to slots of the workspace, a second launch merges them
    carried    one item walks the splits and keeps what it has so far in its slots

Decodes are cut in parallel, which keeps the device busy. Prompts are carried: partial results of all their splits would
be larger than the cache. With `deterministic=False` an item may also reduce all its keys in one go.

Decodes whose sequences have leading blocks in common are attended together where that saves enough bytes
(shared_prefix.py): a shared item holds the rows of all of them over keys of one split, and leaves each row's result in
its own sequence's slot. Where the common keys end inside a split, the sequence's own item goes on from there. The same
tiles in the same order, with the loops interchanged: equal bits.

work   header: items, of 128 rows, of 64, of 16, 0 ...; then items in that order (csrc/cuda/attention.h: AttentionWork)
merge  header: number of entries, 0 ...; then 16-row groups: seq, first row, first slot, number of splits. Entries of a
       shared item's sequences follow each other. More rows than sequences tell the launcher of shared items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.ops.attention import MERGE_COLUMNS, WORK_COLUMNS, AttentionBackend, AttentionPlan, AttentionShape
from pagedllm.ops.kv_layout import PlainLayout
from pagedllm.ops.shared_prefix import KV_SPLIT, KV_TILE, SharedRuns, SharingCosts, find_shared_runs

SLOT_ROWS = 16  # rows of a slot, and of a merge item
SHARED_ROWS = 64  # of a shared item at most: the only kernel that takes them
MAX_LONG_SLOTS = 1024  # slots for parallel splits of items longer than a slot, in a step

CARRIES, CONTINUES, SHARED = 1, 2, 4  # flags of an item
NO_RUNS = SharedRuns(*(np.zeros(0, np.int64) for _ in range(5)))

Ints = NDArray[np.int64]


class CudaAttentionBackend(AttentionBackend):
    """Namespace "pagedllm" on CUDA tensors, or "pagedllm_simt" on the CPU."""

    layout = PlainLayout()
    supported_head_dims = (64, 80, 96, 112, 128, 256)
    supported_dtypes = (torch.bfloat16, torch.float16)

    # A kernel more is started where a decode step has shared items: about 2 us, in which an H200 moves 9 MB.
    shared_launch_bytes = 9 << 20

    def __init__(self, namespace: str, deterministic: bool = True) -> None:
        super().__init__(namespace)
        self.deterministic = deterministic

    def plan(
        self,
        q_lens: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        shape: AttentionShape,
        block_tables: Sequence[NDArray[np.int32]] = (),
        block_size: int = 0,
    ) -> AttentionPlan:
        group = shape.num_q_heads // shape.num_kv_heads
        tallest = 128 if shape.head_dim <= 128 else 64
        runs = NO_RUNS
        if block_tables and group <= SLOT_ROWS:
            costs = SharingCosts(group, shape.head_dim, shape.num_kv_heads, SHARED_ROWS, self.shared_launch_bytes)
            found = find_shared_runs(np.flatnonzero(q_lens == 1), seq_lens, block_tables, block_size, costs)
            runs = found or NO_RUNS
        tiles = self._tiles(q_lens, seq_lens, group, tallest, runs)
        work = np.concatenate((shared_items(runs, seq_lens, group), own_items(tiles, runs)))
        height = work[:, -1]
        order = np.lexsort((work[:, 3] - work[:, 4], -height))  # kernels' order; within a kernel the longest first
        header = np.zeros((1, WORK_COLUMNS), np.int32)
        header[0, :4] = [len(work), *((height == rows).sum() for rows in (128, 64, 16))]
        floats_per_slot = shape.num_kv_heads * SLOT_ROWS * (shape.head_dim + 2)  # accumulators, maximum, sum
        return AttentionPlan(
            np.concatenate((header, work[order, :-1].astype(np.int32))),
            merge_list(tiles, runs, len(q_lens)),
            int(tiles.num_slots.sum()) * floats_per_slot,
        )

    def _tiles(
        self, q_lens: NDArray[np.int32], seq_lens: NDArray[np.int32], group: int, tallest: int, runs: SharedRuns
    ) -> Tiles:
        seq, first_row, num_rows, height = row_tiles(q_lens, group, tallest)
        num_keys = seq_lens[seq] - q_lens[seq] + (first_row + num_rows - 1) // group + 1
        num_splits = -(-num_keys // KV_SPLIT)
        num_groups = height // SLOT_ROWS
        is_parallel = (num_splits > 1) & choose_parallel(seq, num_splits, num_groups)
        is_carried = (num_splits > 1) & ~is_parallel & self.deterministic
        num_slots = np.where(is_parallel, num_groups * num_splits, np.where(is_carried, num_groups, 0))
        num_slots[np.isin(seq, runs.members) & (num_slots == 0)] = 1
        return Tiles(seq, first_row, num_rows, height, num_keys, num_splits, is_parallel, is_carried, num_slots)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of the sequences' packed rows; each may be one item or several."""

    seq: Ints
    first_row: Ints
    num_rows: Ints
    height: Ints  # of the kernel
    num_keys: Ints  # that the last row sees
    num_splits: Ints
    is_parallel: NDArray[np.bool_]
    is_carried: NDArray[np.bool_]
    num_slots: Ints

    @property
    def first_slot(self) -> Ints:
        return self.num_slots.cumsum() - self.num_slots


# Items are rows of AttentionWork's columns, and the height of their kernel.


def own_items(tiles: Tiles, runs: SharedRuns) -> Ints:
    """Of tiles over their own keys: all but what shared items have."""
    items = np.where(tiles.is_parallel, tiles.num_splits, 1)
    tile = np.repeat(np.arange(len(tiles.seq)), items)
    split = np.arange(len(tile)) - np.repeat(items.cumsum() - items, items)
    seq, is_parallel, num_keys = tiles.seq[tile], tiles.is_parallel[tile], tiles.num_keys[tile]
    shared = np.zeros((int(seq.max(initial=0)) + 1, int(items.max(initial=0))), np.int64)  # tiles of 64, by split
    sharers = np.repeat(np.arange(len(runs.first)), runs.count)
    places = np.arange(len(sharers)) - np.repeat(runs.count.cumsum() - runs.count - runs.first, runs.count)
    shared[runs.members[places], runs.split[sharers]] = runs.tiles[sharers]
    skipped = shared[seq, split]
    end_key = np.where(is_parallel, np.minimum((split + 1) * KV_SPLIT, num_keys), num_keys)
    flags = np.where(skipped > 0, CONTINUES, 0)
    flags |= np.where(tiles.is_carried[tile] | ((skipped > 0) & ~is_parallel), CARRIES, 0)
    rows = np.stack(
        (
            seq,
            tiles.first_row[tile],
            tiles.num_rows[tile],
            split * KV_SPLIT + skipped * KV_TILE,
            end_key,
            np.where((is_parallel | (flags > 0)), tiles.first_slot[tile] + split, -1),
            np.where(is_parallel, tiles.num_splits[tile], 1),
            flags,
            tiles.height[tile],
        ),
        1,
    )
    kept: Ints = rows[skipped * KV_TILE < KV_SPLIT]
    return kept


def shared_items(runs: SharedRuns, seq_lens: NDArray[np.int32], group: int) -> Ints:
    """Of runs of sequences, whose entries come first in the merge list."""
    rows = runs.count * group
    num_tiles = -(-rows // SHARED_ROWS)
    run = np.repeat(np.arange(len(rows)), num_tiles)
    first_row = (np.arange(len(run)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * SHARED_ROWS
    num_rows = np.minimum(SHARED_ROWS, rows[run] - first_row)
    positions = seq_lens[runs.members] - 1
    least = np.array([positions[f : f + n].min() for f, n in zip(runs.first, runs.count, strict=True)], np.int64)
    split = runs.split[run]
    return np.stack(
        (
            runs.first[run],
            first_row,
            num_rows,
            split * KV_SPLIT,
            split * KV_SPLIT + runs.tiles[run] * KV_TILE,
            split,
            least[run],
            np.full(len(run), SHARED),
            np.full(len(run), SHARED_ROWS),
        ),
        1,
    )


def merge_list(tiles: Tiles, runs: SharedRuns, num_seqs: int) -> NDArray[np.int32]:
    tile_of = np.zeros(num_seqs, np.int64)  # of members, which have one tile
    tile_of[tiles.seq] = np.arange(len(tiles.seq))
    others = np.flatnonzero(tiles.is_parallel & ~np.isin(tiles.seq, runs.members))
    num_groups = -(-tiles.num_rows[others] // SLOT_ROWS)
    index = np.arange(num_groups.sum()) - np.repeat(num_groups.cumsum() - num_groups, num_groups)  # within the tile
    index = np.concatenate((np.zeros(len(runs.members), np.int64), index))
    tile = np.concatenate((tile_of[runs.members], np.repeat(others, num_groups)))
    num_rows = num_seqs + 1 if len(runs.members) else 0
    merge = np.zeros((1 + max(len(tile), num_rows), MERGE_COLUMNS), np.int32)
    merge[0, 0] = len(tile)
    merge[1 : 1 + len(tile)] = np.stack(
        (
            tiles.seq[tile],
            tiles.first_row[tile] + index * SLOT_ROWS,
            tiles.first_slot[tile] + index * tiles.num_splits[tile],
            np.where(tiles.is_parallel, tiles.num_splits, 0)[tile],
        ),
        1,
    )
    return merge


def row_tiles(q_lens: NDArray[np.int32], group: int, tallest: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts the sequences' packed rows: sequence, first row, number of rows, and height of each tile.

    Where no sequence has more than a token the kernel is told so by the tensors' shapes and runs items of 16 rows only:
    a batch of at most as many tokens as sequences has no others, if a group fits.
    """
    rows = q_lens.astype(np.int64) * group
    is_decode = q_lens.sum() <= len(q_lens) and group <= SLOT_ROWS
    height_of_full = SLOT_ROWS if is_decode else tallest
    num_tiles = -(-rows // height_of_full)
    seq = np.repeat(np.arange(len(q_lens)), num_tiles)
    index = np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first_row = index * height_of_full
    num_rows = np.minimum(height_of_full, rows[seq] - first_row)
    height = np.full(len(seq), height_of_full)
    for smaller in (64, 16):
        height[num_rows <= smaller] = min(smaller, height_of_full)
    return seq, first_row, num_rows, height


def choose_parallel(seq: Ints, num_splits: Ints, num_groups: Ints) -> NDArray[np.bool_]:
    """Which tiles may be cut in parallel: those of one slot, and sequences of one tile while slots are left."""
    is_only_tile = np.bincount(seq, minlength=1)[seq] == 1
    is_long_candidate = is_only_tile & (num_groups > 1) & (num_splits > 1)
    slots_so_far = np.cumsum(np.where(is_long_candidate, num_splits * num_groups, 0))
    is_parallel: NDArray[np.bool_] = (num_groups == 1) | (is_long_candidate & (slots_so_far <= MAX_LONG_SLOTS))
    return is_parallel
