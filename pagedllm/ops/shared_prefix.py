"""Which sequences of a batch have keys in common: the groups whose shared prefix is read once. Pure numpy.

Only sequences with one new token are looked at. Within each split of 512 keys, those whose block tables name the same
blocks for the first 1 to 8 tiles of 64 keys are a group; how many tiles is chosen so that the most bytes are saved. So
a prefix of all, and longer ones of some, are each read once.

A group saves what all but one read for each item of rows would read again. It costs, where its tiles end inside a
split, that each row's state is stored and read back (in whole splits it would be stored anyway). Groups that cost more
are left out, and all of them where together they save less than what a memory moves while one more kernel is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

KV_TILE = 64
KV_SPLIT = 512
TILES_PER_SPLIT = KV_SPLIT // KV_TILE
KV_BYTES = 2  # of an element; CUDA's kernels have 16-bit types only
STATE_BYTES = 4

Ints = NDArray[np.int64]
Tables = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """`members` are sequences; run i is `count[i]` of them from place `first[i]` on, with the same keys at
    split[i] * 512 + (0 ... tiles[i] * 64 - 1)."""

    members: Ints
    first: Ints
    count: Ints
    split: Ints
    tiles: Ints


class SharingRule(Protocol):
    """What is gained, in units of the rule's own; groups that gain nothing are left out."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def launch_bytes(self) -> int:
        """That all groups must save at least, over all KV heads."""

    def saved_bytes(self, counts: Ints, tiles: int) -> Ints:
        """Of groups of so many sequences with so many tiles in common, for one KV head."""


@dataclass(frozen=True, slots=True)
class SharingCosts:
    """The rule on CUDA, in bytes."""

    group: int  # query heads of a KV head
    head_dim: int
    num_kv_heads: int
    rows_per_item: int
    launch_bytes: int  # that all groups must save at least

    def saved_bytes(self, counts: Ints, tiles: int) -> Ints:
        """Of groups of so many sequences with so many tiles in common, for one KV head."""
        num_items = -(-counts * self.group // self.rows_per_item)
        saved = (counts - num_items) * (tiles * KV_TILE * self.head_dim * 2 * KV_BYTES)
        states = counts * self.group * (self.head_dim + 2) * 2 * STATE_BYTES
        return saved - (states if tiles < TILES_PER_SPLIT else 0)


def find_shared_runs(
    seqs: Ints, seq_lens: NDArray[np.int32], block_tables: Tables, block_size: int, costs: SharingRule
) -> SharedRuns | None:
    """Among `seqs`, which index seq_lens and the tables (one per KV group; all must agree). None: nothing to gain."""
    labels, tiles_of = [], []  # per split [len(seqs)]: group or -1, tiles in common
    total = 0
    longest = int(seq_lens[seqs].max(initial=0))
    for split in range(-(-longest // KV_SPLIT)):
        finder = _Split(seqs, seq_lens[seqs], block_tables, block_size, split)
        if not finder.find(costs):
            break
        labels.append(finder.label)
        tiles_of.append(finder.tiles)
        total += finder.saved_bytes
    if not labels or total * costs.num_kv_heads < costs.launch_bytes:
        return None
    order = np.lexsort(labels[::-1])  # by the first split's group, then the second's: groups lie side by side
    order = order[(np.array(labels)[:, order] >= 0).any(0)]
    runs = []
    for split, (label, tiles) in enumerate(zip(labels, tiles_of, strict=True)):
        found, shared = label[order], tiles[order]
        first = np.flatnonzero(np.concatenate(([True], found[1:] != found[:-1])))
        count = np.diff(np.append(first, len(found)))
        kept = (found[first] >= 0) & (count > 1)
        runs.append(np.stack((first, count, np.full(len(first), split), shared[first]))[:, kept])
    first, count, splits, tiles = np.concatenate(runs, 1)
    return SharedRuns(seqs[order], first, count, splits, tiles)


class SharedRunFinder:
    """find_shared_runs, which is not done again while the batch is what it was: sequences that all grew by as many keys
    have the same blocks in common. Comparing tables takes a CPU 0.4 ms less for 128 sequences (docs/log.md)."""

    def __init__(self, rule: SharingRule) -> None:
        self._rule = rule
        self._known: _KnownBatch | None = None

    def find(self, seqs: Ints, seq_lens: NDArray[np.int32], block_tables: Tables, block_size: int) -> SharedRuns | None:
        if self._known is None or not self._known.is_like(seqs, seq_lens, block_tables):
            found = find_shared_runs(seqs, seq_lens, block_tables, block_size, self._rule)
            self._known = _KnownBatch(seqs, seq_lens[seqs], [table[seqs] for table in block_tables], block_size, found)
        return self._known.found


class _KnownBatch:
    def __init__(
        self, seqs: Ints, lengths: NDArray[np.int32], tables: Tables, block_size: int, found: SharedRuns | None
    ) -> None:
        """lengths and tables: of each of `seqs`."""
        self.seqs, self.lengths, self.tables, self.found = seqs, lengths, tables, found
        width = max((table.shape[1] for table in tables), default=0)
        self.is_free = np.arange(width) >= -(-lengths // block_size)[:, None]  # entries of a table that held no key

    def is_like(self, seqs: Ints, seq_lens: NDArray[np.int32], block_tables: Tables) -> bool:
        if not np.array_equal(seqs, self.seqs) or len(block_tables) != len(self.tables):
            return False
        growth = seq_lens[seqs] - self.lengths
        if len(growth) and (growth[0] < 0 or (growth != growth[0]).any()):
            return False
        for table, known in zip(block_tables, self.tables, strict=True):
            width = known.shape[1]
            if table.shape[1] < width:
                return False
            if not ((table[seqs, :width] == known) | self.is_free[:, :width]).all():
                return False
        return True


class _Split:
    """Groups of one split."""

    def __init__(self, seqs: Ints, lengths: NDArray[np.int32], tables: Tables, block_size: int, split: int) -> None:
        self.seqs, self.lengths, self.tables, self.block_size = seqs, lengths, tables, block_size
        self.first_key = split * KV_SPLIT
        self.label = np.full(len(seqs), -1)
        self.tiles = np.zeros(len(seqs), np.int64)
        self.saved_bytes = 0

    def find(self, costs: SharingRule) -> bool:
        """Fills label, tiles and saved_bytes; whether there is any group."""
        num_groups = 0
        while len(free := np.flatnonzero(self.label < 0)) > 1:
            members, groups, gains, tiles = self._best(free, costs)
            is_worth_it = gains > 0
            if not is_worth_it.any():
                break
            kept = is_worth_it[groups]
            number = num_groups + is_worth_it.cumsum() - 1
            self.label[members[kept]] = number[groups[kept]]
            self.tiles[members[kept]] = tiles
            self.saved_bytes += int(gains[is_worth_it].sum())
            num_groups += int(is_worth_it.sum())
        return num_groups > 0

    def _best(self, free: Ints, costs: SharingRule) -> tuple[Ints, Ints, Ints, int]:
        """Members, each one's group, bytes that each group saves, and the number of tiles for which that is most."""
        members, groups, counts = self._groups(free, TILES_PER_SPLIT)
        if len(counts) == 1 and len(members) == len(free):  # most often: all have the whole split in common
            return members, groups, costs.saved_bytes(counts, TILES_PER_SPLIT), TILES_PER_SPLIT
        members, groups, most_counts = self._groups(free, 1)
        best = members, groups, costs.saved_bytes(most_counts, 1), 1
        best_saved = 0
        for tiles in range(TILES_PER_SPLIT, 0, -1):
            if costs.saved_bytes(most_counts, tiles).clip(0).sum() <= best_saved:
                break  # even if nobody left their group for having fewer tiles in common
            members, groups, counts = self._groups(free, tiles)
            gains = costs.saved_bytes(counts, tiles)
            if gains.clip(0).sum() > best_saved:
                best_saved = gains.clip(0).sum()
                best = members, groups, gains, tiles
        return best

    def _groups(self, free: Ints, tiles: int) -> tuple[Ints, Ints, Ints]:
        """Of those that have more keys than these tiles: the members of groups of two or more, each one's group, and
        the groups' sizes."""
        end_key = self.first_key + tiles * KV_TILE
        members = free[self.lengths[free] > end_key]  # a sequence's last key is never shared: it has an item of its own
        begin, end = self.first_key // self.block_size, -(-end_key // self.block_size)
        # The same block at the end means the same blocks before it, unless somebody computed a prefix twice.
        last = self.tables[0][self.seqs[members], end - 1] if len(members) else members
        _, first, groups = np.unique(last, return_index=True, return_inverse=True)
        like = self.seqs[members[first[groups]]]
        agrees = np.ones(len(members), bool)
        for table in self.tables:
            agrees &= (table[self.seqs[members], begin:end] == table[like, begin:end]).all(1)
        counts = np.bincount(groups[agrees], minlength=len(first))
        is_group = counts > 1
        kept = agrees & is_group[groups]
        return members[kept], (is_group.cumsum() - 1)[groups[kept]], counts[is_group]
