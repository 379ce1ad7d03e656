"""Paged attention and its backends.

One operator serves decode, chunked prefill and mixtures of both. Keys are reduced in tiles of 64 absolute positions
inside splits of 512, always, and splits are merged in order: a row's bits depend on its own keys only, not on the
batch, the chunking or the block size (exactness rule b).

An AttentionBackend owns the layout of the KV cache and the work list. It is chosen by configuration, never inferred
from a tensor's device, and nobody else indexes a cache tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.ops._library import operator
from pagedllm.ops.kv_layout import CpuLayout, KVLayout
from pagedllm.ops.kv_write import copy_blocks, rope_norm_write_kv
from pagedllm.ops.shared_prefix import SharedRunFinder, SharedRuns

KV_TILE = 64  # absolute positions reduced together
KV_SPLIT = 512  # absolute positions of one partial result
WORK_COLUMNS = 8
MERGE_COLUMNS = 4
SUPPORTED_BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Who attends to what in one step; built once a step, read by every layer.

    Rows of a sequence are packed per KV head: row r is token r // G, query head kv_head * G + r % G, with
    G = num_q_heads / num_kv_heads. Row 0 of `work` and of `merge` is a header whose first element counts the items
    that follow: a captured graph reads it on the device.

    work  [1 + W, 8] int32: seq, first row, number of rows, first key (a multiple of 512), end of keys, merge, number of
          items together, end of shared keys
    merge [1 + M, 4] int32: seq, first row, first slot, number of splits; rows as in its work items

    Where an item has all keys of its rows, merge is -1 and it writes `out`. Else it is one split of them: it leaves a
    partial result in the workspace, and `merge` is the entry, counted from 0, that folds the splits in order: those of
    split i lie i times the number of rows behind the first slot, a place a row (a place: for each KV head head_dim
    sums, a maximum, a sum of weights).

    Items of several sequences that follow each other may have keys in common, whole tiles from their first key to the
    end of shared keys: the first one counts them, itself included, the others have 0 there. Where nothing is shared the
    columns are 1 and the first key. So it is on the CPU; CUDA's lists have the same first columns, the rest as in
    ops/cuda_attention.py.
    """

    cu_seqlens_q: Tensor  # [B + 1] int32, where each sequence's new tokens begin
    seq_lens: Tensor  # [B] int32, keys of each sequence, new ones included
    block_tables: tuple[Tensor, ...]  # per KV group: [B, max_blocks] int32
    slot_mappings: tuple[Tensor, ...]  # per KV group: [T] int64
    work: Tensor
    merge: Tensor
    workspace: Tensor  # float32, as many elements as the plan asks for


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    bytes_per_block: int  # of one layer, K and V


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    work: NDArray[np.int32]  # [1 + W, 8]
    merge: NDArray[np.int32]  # [1 + M, 4]
    workspace_size: int  # float32 elements


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan must know of the heads."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


def paged_attention_with(
    layout: KVLayout,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> None:
    """The twin for any layout: plain softmax in float32, one sequence at a time; arguments as in `paged_attention`."""
    for seq, length in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[seq : seq + 2].tolist()
        num_new = end - begin
        if num_new == 0:
            continue
        block_size = layout.block_size(k_cache)
        lowest = max(0, length - num_new + 1 - window) if window > 0 else 0  # key that the first new token sees
        first_block, end_block = lowest // block_size, -(-length // block_size)
        k, v = layout.read_blocks(k_cache, v_cache, block_table[seq, first_block:end_block])
        group = q.shape[1] // k.shape[1]
        seen = slice(lowest - first_block * block_size, length - first_block * block_size)
        k, v = (x[seen].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = torch.arange(length - num_new, length)[:, None]
        key_position = torch.arange(lowest, length)[None]
        is_visible = key_position <= query_position
        if window > 0:
            is_visible &= key_position > query_position - window
        scores = scores.masked_fill(~is_visible, -torch.inf)
        if sinks is not None:  # a key of no value that takes its share of the softmax
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, num_new, 1)), -1)
        weights = scores.softmax(-1)[..., : length - lowest]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


@operator(
    "paged_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor cu_seqlens_q, Tensor seq_lens, Tensor work, Tensor merge, Tensor(b!) workspace, Tensor? sinks, "
    "float scale, float softcap, int window) -> ()"
)
def paged_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    work: Tensor,
    merge: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> None:
    """Causal attention of new tokens over their sequences' blocks; K and V of the new tokens are already written.

    out, q:   [num_tokens, num_q_heads, head_dim], rows may be strided, heads and features contiguous
    k_cache, v_cache: one layer's, in the backend's layout; slots past a sequence's end may hold anything, NaN too, and
              so may those before the window of its first new token, whose entries in block_table may be any block
    sinks:    [num_q_heads] float32 or None (gpt-oss)
    scale:    multiplies q.k, above 0;  softcap: 0 = off, else s = softcap * tanh(s / softcap)
    window:   0 = all earlier keys, else the last `window` keys, the token itself included
    Others as in AttentionMetadata.
    """
    paged_attention_with(
        CpuLayout(), out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks, scale, softcap, window
    )


class AttentionBackend(ABC):
    """The layout of the KV cache, and attention over it."""

    layout: KVLayout
    supported_head_dims: tuple[int, ...]
    supported_dtypes: tuple[torch.dtype, ...]

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace  # of the operators: "pagedllm", "pagedllm_simt", "pagedllm_reference"

    def kv_cache_spec(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCacheSpec:
        """Shapes of one layer's cache. Raises ValueError, by name, for what the kernels cannot do."""
        if block_size not in SUPPORTED_BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {SUPPORTED_BLOCK_SIZES}, got {block_size}")
        if head_dim not in self.supported_head_dims:
            raise ValueError(f"head_dim must be one of {self.supported_head_dims}, got {head_dim}")
        if dtype not in self.supported_dtypes:
            raise ValueError(f"dtype must be one of {self.supported_dtypes}, got {dtype}")
        k_shape, v_shape = self.layout.shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype)
        return KVCacheSpec(k_shape, v_shape, dtype, 2 * block_size * num_kv_heads * head_dim * dtype.itemsize)

    @abstractmethod
    def plan(
        self,
        q_lens: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        shape: AttentionShape,
        block_tables: Sequence[NDArray[np.int32]] = (),
        block_size: int = 0,
    ) -> AttentionPlan:
        """The work list of a step. A row's bits do not depend on it, so it may be made for speed.

        block_tables, one per KV group as in AttentionMetadata, and block_size: where given, a backend may look for
        sequences that have blocks in common and read those once.
        """

    def write_kv(
        self,
        qkv: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        rope_table: Tensor | None,
        rope_rows: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        shape: AttentionShape,
        is_interleaved: bool,
    ) -> None:
        """`rope_norm_write_kv` on one layer's cache."""
        rope_norm_write_kv(
            self.namespace, qkv, *kv_cache, slot_mapping, rope_table, rope_rows, q_norm, k_norm, eps,
            shape.num_q_heads, shape.num_kv_heads, is_interleaved,
        )  # fmt: skip

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        kv_group: int,
        sinks: Tensor | None,
        scale: float,
        softcap: float,
        window: int,
    ) -> None:
        """`paged_attention` on one layer's cache."""
        paged_attention(
            self.namespace, out, q, *kv_cache, metadata.block_tables[kv_group], metadata.cu_seqlens_q,
            metadata.seq_lens, metadata.work, metadata.merge, metadata.workspace, sinks, scale, softcap, window,
        )  # fmt: skip

    def copy_blocks(self, kv_cache: tuple[Tensor, Tensor], pairs: Tensor) -> None:
        """pairs [num_pairs, 2] int32 of (from, to)."""
        copy_blocks(self.namespace, *kv_cache, pairs)

    def read_block(self, kv_cache: tuple[Tensor, Tensor], block_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a block, copies [block_size, num_kv_heads, head_dim]. For twins and tests."""
        return self.layout.read_blocks(*kv_cache, torch.tensor([block_id]))


class CpuAttentionBackend(AttentionBackend):
    """Namespace "pagedllm" on CPU tensors, or "pagedllm_reference"."""

    layout = CpuLayout()
    supported_head_dims = tuple(range(32, 257, 16))
    supported_dtypes = (torch.bfloat16, torch.float32)
    rows_per_item = 48  # +5 % over 32 at head_dim 64 and 128; the kernel can do 64
    tiles_not_split = 8  # so many row tiles of one sequence are work enough without splitting their keys

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self._finder = SharedRunFinder(TilesSaved())

    def plan(
        self,
        q_lens: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        shape: AttentionShape,
        block_tables: Sequence[NDArray[np.int32]] = (),
        block_size: int = 0,
    ) -> AttentionPlan:
        """Tiles of `rows_per_item` packed rows; those of short runs of new tokens are cut into splits of keys."""
        group = shape.num_q_heads // shape.num_kv_heads
        rows = q_lens.astype(np.int64) * group
        tiles_per_seq = -(-rows // self.rows_per_item)
        seq = np.repeat(np.arange(len(q_lens)), tiles_per_seq)  # of each tile, as all below
        first_row = (np.arange(len(seq)) - (tiles_per_seq.cumsum() - tiles_per_seq)[seq]) * self.rows_per_item
        num_rows = np.minimum(self.rows_per_item, rows[seq] - first_row)
        num_keys = (seq_lens - q_lens)[seq] + (first_row + num_rows - 1) // group + 1  # that the last row sees
        num_splits = -(-num_keys // KV_SPLIT)
        is_split = (num_splits > 1) & (tiles_per_seq < self.tiles_not_split)[seq]
        num_items = np.where(is_split, num_splits, 1)
        end_slot = (is_split * num_splits * num_rows).cumsum()
        first_slot = end_slot - is_split * num_splits * num_rows

        tile = np.repeat(np.arange(len(seq)), num_items)  # of each item
        split = np.arange(len(tile)) - (num_items.cumsum() - num_items)[tile]
        work = np.zeros((1 + len(tile), WORK_COLUMNS), np.int32)
        work[0, 0] = len(tile)
        work[1:, 0] = seq[tile]
        work[1:, 1] = first_row[tile]
        work[1:, 2] = num_rows[tile]
        work[1:, 3] = work[1:, 7] = split * KV_SPLIT
        work[1:, 4] = np.where(is_split[tile], np.minimum((split + 1) * KV_SPLIT, num_keys[tile]), num_keys[tile])
        work[1:, 5] = np.where(is_split, is_split.cumsum() - 1, -1)[tile]
        work[1:, 6] = 1

        merge = np.zeros((1 + int(is_split.sum()), MERGE_COLUMNS), np.int32)
        merge[0, 0] = len(merge) - 1
        merge[1:] = np.stack((seq, first_row, first_slot, num_splits), 1)[is_split]
        num_places = int(end_slot[-1]) if len(end_slot) else 0

        if block_tables:
            is_candidate = (q_lens == 1)[seq] & (num_items == num_splits) & (num_rows == group)
            runs = self._finder.find(seq[is_candidate], seq_lens, block_tables, block_size)
            if runs is not None:
                work[1:] = put_together(work[1:], runs, seq_lens)
        return AttentionPlan(work, merge, num_places * shape.num_kv_heads * (shape.head_dim + 2))


@dataclass(frozen=True, slots=True)
class TilesSaved:
    """Sharing on a CPU: it saves what all but one of a group would read, and costs nothing (docs/log.md)."""

    num_kv_heads: int = 1
    launch_bytes: int = 0

    def saved_bytes(self, counts: NDArray[np.int64], tiles: int) -> NDArray[np.int64]:
        return (counts - 1) * tiles


def put_together(items: NDArray[np.int32], runs: SharedRuns, seq_lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The items with those of each run side by side, by length, and before all others. Sequences of runs have an item a
    split. Kernels read what several share through the first one's table, and a window shows the shortest most."""
    run = np.repeat(np.arange(len(runs.count)), runs.count)  # of each place among the items of runs
    index = np.arange(len(run)) - (runs.count.cumsum() - runs.count)[run]
    first_item = np.searchsorted(items[:, 0], np.arange(int(items[-1, 0]) + 1))  # of each sequence
    members = runs.members[runs.first[run] + index]
    members = members[np.lexsort((seq_lens[members], run))]
    shared = first_item[members] + runs.split[run]
    is_other = np.ones(len(items), bool)
    is_other[shared] = False
    items = np.concatenate((items[shared], items[is_other]))
    items[: len(run), 6] = np.where(index == 0, runs.count[run], 0)
    items[: len(run), 7] += (runs.tiles * KV_TILE)[run].astype(np.int32)
    return items
