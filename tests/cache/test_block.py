"""FreeBlockQueue: order and removal."""

from __future__ import annotations

import pytest

from pagedllm.cache.block import FreeBlockQueue, KVCacheBlock


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_blocks_leave_in_the_order_they_came() -> None:
    queue = FreeBlockQueue(KVCacheBlock(i) for i in range(3))
    assert [queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert len(queue) == 0
    assert ids(queue) == []


def test_a_block_can_leave_from_the_head_the_middle_and_the_tail() -> None:
    blocks = [KVCacheBlock(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    for block_id, rest in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(blocks[block_id])
        assert ids(queue) == rest
        assert len(queue) == len(rest)
    queue.append(blocks[0])
    assert ids(queue) == [1, 3, 0]


def test_a_block_at_the_head_is_the_next_to_leave() -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = FreeBlockQueue(blocks[:1])
    queue.prepend(blocks[1])
    queue.append(blocks[2])
    assert ids(queue) == [1, 0, 2]
    assert len(queue) == 3
    assert queue.popleft() is blocks[1]


def test_a_removed_block_keeps_no_link() -> None:
    block = KVCacheBlock(0)
    FreeBlockQueue([block, KVCacheBlock(1)]).remove(block)
    assert block.prev_free is None
    assert block.next_free is None


def test_misuse_is_refused() -> None:
    block = KVCacheBlock(7)
    queue = FreeBlockQueue([block])
    with pytest.raises(AssertionError, match="block 7 is free twice"):
        queue.append(block)
    with pytest.raises(AssertionError, match="block 7 is free twice"):
        queue.prepend(block)
    queue.remove(block)
    with pytest.raises(AssertionError, match="block 7 is not free"):
        queue.remove(block)
    with pytest.raises(AssertionError, match="queue is empty"):
        queue.popleft()
