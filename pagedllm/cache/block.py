"""KVCacheBlock and FreeBlockQueue: who is free, in which order.

A block is a number that the runner understands, and what the host must know of it. A block is in the free queue
exactly while nobody holds it; it may still be in the hash table then, and a hit takes it out from the middle, so the
queue is doubly linked through the blocks themselves: adding and removing are O(1) and allocate nothing.
Called by BlockPool only.

    head -> [7] <-> [3] <-> [5] <- tail        allocation takes 7 first
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    block_id: int
    ref_count: int = 0  # requests that hold it
    block_hash: bytes | None = None  # set while it is in the hash table
    group: int = 0  # the KV group under which it is there
    is_pending: bool = False  # in the hash table, but its K and V are only computed by the step being scheduled
    prev_free: KVCacheBlock | None = None
    next_free: KVCacheBlock | None = None


class FreeBlockQueue:
    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._end = KVCacheBlock(-1)  # before the head and behind the tail: no special cases
        self._end.prev_free = self._end.next_free = self._end
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From the next one to be allocated to the last."""
        block = self._end.next_free
        while block is not self._end:
            assert block is not None
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """To the tail: the last one to be allocated."""
        assert self._end.prev_free is not None
        self._insert(block, self._end.prev_free, self._end)

    def prepend(self, block: KVCacheBlock) -> None:
        """To the head: the next one to be allocated."""
        assert self._end.next_free is not None
        self._insert(block, self._end, self._end.next_free)

    def popleft(self) -> KVCacheBlock:
        first = self._end.next_free
        assert first is not self._end, "the free queue is empty"
        assert first is not None
        self.remove(first)
        return first

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, f"block {block.block_id} is not free"
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert(self, block: KVCacheBlock, before: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.next_free is None, f"block {block.block_id} is free twice"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self._length += 1
