"""FutureUses: which blocks the requests that wait will ask for, and when. Filled by KVCacheManager, read by BlockPool.

A user is known by its rank, the place in the plan. Ranks mostly come and go in order, so both ends are O(1).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from pagedllm.cache.block import KVCacheBlock


class FutureUses:
    """Most blocks have one user: a plain int then, which costs the garbage collector nothing."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, int | deque[int]] = {}  # one, or several in ascending order

    def add(self, block_hashes: Iterable[bytes], rank: int) -> None:
        for block_hash in block_hashes:
            ranks = self._ranks.get(block_hash)
            if ranks is None:
                self._ranks[block_hash] = rank
            elif isinstance(ranks, int):
                self._ranks[block_hash] = deque(sorted((ranks, rank)))
            elif rank >= ranks[-1]:
                ranks.append(rank)
            elif rank <= ranks[0]:
                ranks.appendleft(rank)
            else:
                ranks.insert(next(i for i, other in enumerate(ranks) if other > rank), rank)

    def remove(self, block_hashes: Iterable[bytes], rank: int) -> None:
        """These must have been added with this rank."""
        for block_hash in block_hashes:
            ranks = self._ranks[block_hash]
            if isinstance(ranks, int):
                assert ranks == rank
                del self._ranks[block_hash]
                continue
            if ranks[0] == rank:
                ranks.popleft()
            else:
                ranks.remove(rank)
            if len(ranks) == 1:
                self._ranks[block_hash] = ranks[0]

    def next_use(self, block_hash: bytes | None) -> int | None:
        """The rank of the first who will ask for it."""
        ranks = None if block_hash is None else self._ranks.get(block_hash)
        return ranks if ranks is None or isinstance(ranks, int) else ranks[0]


class RetainedBlocks:
    """Free blocks that somebody will ask for: a heap by next use, of which the furthest is given up first.

    Uses change while a block lies here. What the heap says is looked up again when it comes to the top.
    """

    def __init__(self, uses: FutureUses) -> None:
        self._uses = uses
        self._keys: dict[KVCacheBlock, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], KVCacheBlock]] = []  # with entries that no longer count
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self._keys

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._keys)

    def add(self, block: KVCacheBlock, next_use: int) -> None:
        """Of blocks with the same use those that came first go first: ends of chains before prefixes."""
        assert block not in self._keys, f"block {block.block_id} is free twice"
        self._push(block, next_use, self._num_added)
        self._num_added += 1

    def remove(self, block: KVCacheBlock) -> None:
        del self._keys[block]
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, block) for block, key in self._keys.items()]
            heapq.heapify(self._heap)

    def pop_furthest(self) -> KVCacheBlock:
        while True:
            key, block = heapq.heappop(self._heap)
            if self._keys.get(block) != key:
                continue
            next_use = self._uses.next_use(block.block_hash)
            if next_use is None or -next_use == key[0]:
                del self._keys[block]
                return block
            self._push(block, next_use, key[1])

    def _push(self, block: KVCacheBlock, next_use: int, number: int) -> None:
        key = (-next_use, number)
        self._keys[block] = key
        heapq.heappush(self._heap, (key, block))
