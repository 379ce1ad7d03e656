"""Which sequences of a batch have keys in common: the groups whose shared prefix is read once. Pure numpy.

Only sequences with one new token are looked at. Within each split of 512 keys, those whose block tables name the same
blocks for the first 1 to 8 tiles of 64 keys are a group; how many tiles is chosen so that the most bytes are saved. So
a prefix of all, and longer ones of some, are each read once.

A group saves what all but one read for each item of rows would read again. It costs, where its tiles end inside a
split, that each row's state is stored and read back (in whole splits it would be stored anyway). Groups that cost more
are left out, and all of them where together they save less than what a memory moves while one more kernel is started.

Where a window hides the beginning of a text, a sequence counts from the tile on that it sees; what its table names
before is anybody's. The shortest of a group sees all that any of them sees: the keys are read through its table.
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
NONE: Ints = np.zeros(1, np.int64)
Tables = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """`members` are sequences; run i is `count[i]` of them from place `first[i]` on, with the same keys at
    split[i] * 512 + (0 ... tiles[i] * 64 - 1), but for what a window hides: the shortest has all that any sees."""

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

    def saved_bytes(self, counts: Ints, tiles: int, hidden: Ints = NONE, least_hidden: Ints = NONE) -> Ints:
        """Of groups of so many sequences with so many tiles in common, for one KV head.

        hidden: of these tiles, what windows hide from the group's sequences, in all; least_hidden: from the shortest.
        """


@dataclass(frozen=True, slots=True)
class SharingCosts:
    """The rule on CUDA, in bytes."""

    group: int  # query heads of a KV head
    head_dim: int
    num_kv_heads: int
    rows_per_item: int
    launch_bytes: int  # that all groups must save at least

    def saved_bytes(self, counts: Ints, tiles: int, hidden: Ints = NONE, least_hidden: Ints = NONE) -> Ints:
        num_items = -(-counts * self.group // self.rows_per_item)
        num_tiles = (counts * tiles - hidden) - num_items * (tiles - least_hidden)
        saved = num_tiles * (KV_TILE * self.head_dim * 2 * KV_BYTES)
        states = counts * self.group * (self.head_dim + 2) * 2 * STATE_BYTES
        return saved - states if tiles < TILES_PER_SPLIT else saved


def find_shared_runs(
    seqs: Ints, seq_lens: NDArray[np.int32], block_tables: Tables, block_size: int, costs: SharingRule, window: int = 0
) -> SharedRuns | None:
    """Among `seqs`, which index seq_lens and the tables. None: nothing to gain.

    block_tables: of the KV groups of one window (0: none), all of which must agree.
    """
    lengths = seq_lens[seqs].astype(np.int64)
    first_seen = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    found: list[_Split] = []
    total = 0
    for number in range(int(first_seen.min(initial=0)) // KV_SPLIT, -(-int(lengths.max(initial=0)) // KV_SPLIT)):
        split = _Split(number, seqs, lengths, first_seen, block_tables, block_size)
        if split.find(costs):
            found.append(split)
            total += split.saved_bytes
        elif (first_seen < split.end_key).all():
            break
    if not found or total * costs.num_kv_heads < costs.launch_bytes:
        return None
    labels = np.array([split.label for split in found])
    order = np.lexsort(labels[::-1])  # by the first split's group, then the second's: groups lie side by side
    order = order[(labels[:, order] >= 0).any(0)]
    runs = []
    for split in found:
        label, tiles = split.label[order], split.tiles[order]
        first = np.flatnonzero(np.concatenate(([True], label[1:] != label[:-1])))
        count = np.diff(np.append(first, len(label)))
        kept = (label[first] >= 0) & (count > 1)
        runs.append(np.stack((first, count, np.full(len(first), split.number), tiles[first]))[:, kept])
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

    def __init__(
        self, number: int, seqs: Ints, lengths: Ints, first_seen: Ints, tables: Tables, block_size: int
    ) -> None:
        """lengths: keys of each of `seqs`; first_seen: the first one that its window shows."""
        self.number, self.seqs, self.lengths, self.first_seen = number, seqs, lengths, first_seen
        self.tables, self.block_size = tables, block_size
        self.first_key, self.end_key = number * KV_SPLIT, (number + 1) * KV_SPLIT
        self.hidden = (first_seen // KV_TILE - number * TILES_PER_SPLIT).clip(0, TILES_PER_SPLIT)  # tiles
        self.has_windows = bool((first_seen > self.first_key).any())
        self.label = np.full(len(seqs), -1)  # group, or none
        self.tiles = np.zeros(len(seqs), np.int64)  # in common with the group
        self.saved_bytes = 0

    def find(self, costs: SharingRule) -> bool:
        """Fills label, tiles and saved_bytes; whether there is any group."""
        num_groups = 0
        can_share = (self.lengths > self.first_key + KV_TILE) & (self.hidden < TILES_PER_SPLIT)
        while len(free := np.flatnonzero((self.label < 0) & can_share)) > 1:
            best = self._best(free, costs)
            if best is None:
                break
            is_worth_it = best.gains > 0
            kept = is_worth_it[best.groups]
            number = num_groups + is_worth_it.cumsum() - 1
            self.label[best.members[kept]] = number[best.groups[kept]]
            self.tiles[best.members[kept]] = best.tiles
            self.saved_bytes += int(best.gains[is_worth_it].sum())
            num_groups += int(is_worth_it.sum())
        return num_groups > 0

    def _best(self, free: Ints, costs: SharingRule) -> _Groups | None:
        """Those whose number of tiles saves most."""
        best, saved_bytes = None, 0
        for tiles, most in zip(range(TILES_PER_SPLIT, 0, -1), self._most_sharers(free)[::-1], strict=True):
            if int(costs.saved_bytes(most[None], tiles)[0]) <= saved_bytes:
                continue
            groups = self._groups(free, tiles, costs)
            if len(groups.members) == len(free) and len(groups.gains) == 1:  # most often: all have the split in common
                return groups
            if groups.saved_bytes > saved_bytes:
                best, saved_bytes = groups, groups.saved_bytes
        return best

    def _most_sharers(self, free: Ints) -> Ints:
        """For each number of tiles, how many name a block at their end that another one names there too. No groups have
        more members, nor save more than one of all these would."""
        end_keys = self.first_key + KV_TILE * np.arange(1, 1 + TILES_PER_SPLIT)
        table = self.tables[0]
        blocks = (-(-end_keys // self.block_size) - 1).clip(0, table.shape[1] - 1)
        ids = table[self.seqs[free]][:, blocks].T
        is_member = (self.lengths[free] > end_keys[:, None]) & (self.first_seen[free] < end_keys[:, None])
        ids = np.sort(np.where(is_member, ids, -1 - np.arange(len(free))), 1)
        is_next = ids[:, 1:] == ids[:, :-1]
        is_shared = np.zeros(ids.shape, bool)
        is_shared[:, 1:] = is_next
        is_shared[:, :-1] |= is_next
        counts: Ints = is_shared.sum(1)
        return counts

    def _groups(self, free: Ints, tiles: int, costs: SharingRule) -> _Groups:
        """Of two or more that see some of these tiles and have more keys."""
        end_key = self.first_key + tiles * KV_TILE
        # a sequence's last key is never shared: it has an item of its own
        members = free[(self.lengths[free] > end_key) & (self.hidden[free] < tiles)]
        if self.has_windows:
            members = members[self.lengths[members].argsort(kind="stable")]
        begin, end = self.first_key // self.block_size, -(-end_key // self.block_size)
        # The same block at the end means the same blocks before it, unless somebody computed a prefix twice.
        last = self.tables[0][self.seqs[members], end - 1] if len(members) else members
        _, first, groups = np.unique(last, return_index=True, return_inverse=True)
        shortest = members[first]
        like = self.seqs[shortest[groups]]
        agrees = np.ones(len(members), bool)
        for table in self.tables:
            differs = table[self.seqs[members], begin:end] != table[like, begin:end]
            if self.has_windows and len(members):
                differs &= self.first_seen[members, None] < np.arange(begin + 1, end + 1) * self.block_size
            agrees &= ~differs.any(1)
        counts = np.bincount(groups[agrees], minlength=len(first))
        is_group = counts > 1
        kept = agrees & is_group[groups]
        members, groups = members[kept], (is_group.cumsum() - 1)[groups[kept]]
        counts = counts[is_group]
        hidden = np.bincount(groups, self.hidden[members], minlength=len(counts)).astype(np.int64)
        gains = costs.saved_bytes(counts, tiles, hidden, self.hidden[shortest[is_group]])
        return _Groups(members, groups, counts, gains, tiles)


@dataclass(frozen=True, slots=True)
class _Groups:
    members: Ints
    groups: Ints  # of each member
    counts: Ints  # of each group
    gains: Ints  # bytes that each group saves, or less than none
    tiles: int

    @property
    def saved_bytes(self) -> int:
        return int(self.gains.clip(0).sum())
