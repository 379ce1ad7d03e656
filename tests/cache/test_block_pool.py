"""BlockPool: who is free, in which order, and what is still in the hash table."""

from __future__ import annotations

import pytest

from pagedllm.cache.block_pool import BlockPool


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue]


def test_freed_blocks_with_a_hash_go_behind_the_others_in_the_order_given() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    assert [block.block_id for block in blocks] == [0, 1, 2, 3]
    for block, block_hash in zip(blocks, (b"a", b"b", b"c", b"d"), strict=True):
        pool.offer(block, block_hash)
    pool.free(reversed(blocks[:3]))
    assert free_ids(pool) == [4, 5, 2, 1, 0]
    assert (pool.num_free, pool.num_used) == (5, 1)


def test_freed_blocks_without_a_hash_go_before_those_that_were_never_used() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    pool.offer(blocks[1], b"a")
    pool.free(reversed(blocks[:3]))
    assert free_ids(pool) == [0, 2, 4, 5, 1]
    assert [block.block_id for block in pool.allocate(3)] == [0, 2, 4]


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.hold((block,))
    pool.free((block,))
    assert free_ids(pool) == [1]
    pool.free((block,))
    assert free_ids(pool) == [0, 1]
    with pytest.raises(AssertionError, match="block 0 is freed by nobody"):
        pool.free((block,))


def test_a_free_block_is_hit_until_allocation_reaches_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert pool.offer(blocks[0], b"a")
    assert pool.offer(blocks[1], b"b")
    pool.free(reversed(blocks))
    assert free_ids(pool) == [2, 1, 0]
    hit = pool.find(b"b")
    assert hit is blocks[1]
    pool.hold((hit,))
    assert free_ids(pool) == [2, 0]
    assert [block.block_id for block in pool.allocate(2)] == [2, 0]
    assert pool.find(b"a") is None
    assert pool.find(b"b") is hit
    assert blocks[0].block_hash is None


def test_the_first_block_with_a_content_stays_the_one_that_is_hit() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.offer(first, b"a")
    assert not pool.offer(second, b"a")
    assert pool.find(b"a") is first
    assert second.block_hash is None
    assert (first.is_pending, second.is_pending) == (True, False)


def test_forgetting_leaves_the_block_where_it_is() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.offer(block, b"a")
    pool.forget(block)
    pool.forget(block)
    assert pool.find(b"a") is None
    assert (block.ref_count, block.is_pending, pool.num_cached) == (1, False, 0)


def test_a_free_block_whose_hash_is_forgotten_is_the_next_to_be_taken() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, block_hash in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.offer(block, block_hash)
    pool.expect((b"c",), rank=1)
    pool.free(blocks)
    assert free_ids(pool) == [3, 0, 1]
    pool.forget(blocks[1])
    pool.forget(blocks[2])
    assert free_ids(pool) == [2, 1, 3, 0]
    assert len(pool.retained) == 0


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)
