"""The CUDA backend's work list: which block of threads attends which rows over which keys.

Kernels exist for items of 128, 64 and 16 packed rows (128 up to head_dim 128). A row's bits do not depend on the item
it falls into, so the choice is free: full items first, the rest of a sequence in the smallest that holds it.

A tile of rows that sees more than one split of 512 keys is cut in one of two ways, with equal bits:

    parallel   an item for each split; partial results go to slots of the workspace, a second launch merges them
    carried    one item walks the splits and keeps what it has so far in its slots

Decodes are cut in parallel, which keeps the device busy. Prompts are carried: partial results of all their splits would
be larger than the cache. With `deterministic=False` an item may also reduce all its keys in one go.

work   header: items, of 128 rows, of 64, of 16, 0 ...; then items in that order (csrc/cuda/attention.h: AttentionWork)
merge  header: number of 16-row groups, 0 ...; then seq, first row, first slot, number of splits
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.ops.attention import (
    KV_SPLIT,
    MERGE_COLUMNS,
    WORK_COLUMNS,
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
)
from pagedllm.ops.kv_layout import PlainLayout

SLOT_ROWS = 16  # rows of a slot, and of a merge item
MAX_LONG_SLOTS = 1024  # slots for parallel splits of items longer than a slot, in a step

Ints = NDArray[np.int64]


class CudaAttentionBackend(AttentionBackend):
    """Namespace "pagedllm" on CUDA tensors, or "pagedllm_simt" on the CPU."""

    layout = PlainLayout()
    supported_head_dims = (64, 80, 96, 112, 128, 256)
    supported_dtypes = (torch.bfloat16, torch.float16)

    def __init__(self, namespace: str, deterministic: bool = True) -> None:
        super().__init__(namespace)
        self.deterministic = deterministic

    def plan(self, q_lens: NDArray[np.int32], seq_lens: NDArray[np.int32], shape: AttentionShape) -> AttentionPlan:
        group = shape.num_q_heads // shape.num_kv_heads
        seq, first_row, num_rows, height = row_tiles(q_lens, group, 128 if shape.head_dim <= 128 else 64)
        last_token = (first_row + num_rows - 1) // group
        num_keys = seq_lens[seq] - q_lens[seq] + last_token + 1
        order = np.lexsort((-num_keys, -height))  # kernels' order; within a kernel the longest first
        seq, first_row, num_rows, height, num_keys = (x[order] for x in (seq, first_row, num_rows, height, num_keys))

        num_splits = -(-num_keys // KV_SPLIT)
        num_groups = height // SLOT_ROWS
        is_parallel = (num_splits > 1) & choose_parallel(seq, num_splits, num_groups)
        is_carried = (num_splits > 1) & ~is_parallel & self.deterministic
        num_slots = np.where(is_parallel, num_groups * num_splits, np.where(is_carried, num_groups, 0))
        first_slot = np.cumsum(num_slots) - num_slots

        items = np.where(is_parallel, num_splits, 1)
        tile = np.repeat(np.arange(len(seq)), items)
        split = np.arange(len(tile)) - np.repeat(np.cumsum(items) - items, items)
        work = np.zeros((1 + len(tile), WORK_COLUMNS), np.int32)
        work[0, 0] = len(tile)
        work[0, 1:4] = [(height[tile] == rows).sum() for rows in (128, 64, 16)]
        work[1:, 0] = seq[tile]
        work[1:, 1] = first_row[tile]
        work[1:, 2] = num_rows[tile]
        work[1:, 3] = split * KV_SPLIT
        work[1:, 4] = np.where(is_parallel[tile], np.minimum((split + 1) * KV_SPLIT, num_keys[tile]), num_keys[tile])
        work[1:, 5] = np.where(num_slots[tile] > 0, first_slot[tile] + split, -1)
        work[1:, 6] = np.where(is_parallel[tile], num_splits[tile], 1)
        work[1:, 7] = is_carried[tile]

        merged = np.repeat(np.flatnonzero(is_parallel), -(-num_rows[is_parallel] // SLOT_ROWS))
        index = np.arange(len(merged)) - np.searchsorted(merged, merged)  # of the group within its tile
        merge = np.zeros((1 + len(merged), MERGE_COLUMNS), np.int32)
        merge[0, 0] = len(merged)
        merge[1:, 0] = seq[merged]
        merge[1:, 1] = first_row[merged] + index * SLOT_ROWS
        merge[1:, 2] = first_slot[merged] + index * num_splits[merged]
        merge[1:, 3] = num_splits[merged]
        floats_per_slot = shape.num_kv_heads * SLOT_ROWS * (shape.head_dim + 2)  # accumulators, maximum, sum
        return AttentionPlan(work, merge, int(num_slots.sum()) * floats_per_slot)


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
