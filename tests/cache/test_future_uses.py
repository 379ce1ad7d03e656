"""Blocks that somebody will ask for stay; of those the one that is asked for last goes first."""

from __future__ import annotations

import random

from pagedllm.cache.block_pool import BlockPool
from pagedllm.cache.future_uses import FutureUses


def filled_pool(names: bytes, *expected: tuple[bytes, int]) -> BlockPool:
    """Blocks 0, 1 ... named so, all held, with those who wait: names and rank."""
    pool = BlockPool(len(names))
    for block, name in zip(pool.allocate(len(names)), names, strict=True):
        assert pool.offer(block, bytes((name,)))
        block.is_pending = False
    for wanted, rank in expected:
        pool.expect([bytes((name,)) for name in wanted], rank)
    return pool


def allocate_all(pool: BlockPool) -> list[int]:
    return [pool.allocate(1)[0].block_id for _ in range(pool.num_free)]


def test_the_furthest_use_is_given_up_first_after_the_free_queue() -> None:
    pool = filled_pool(b"abcd", (b"a", 5), (b"b", 2), (b"d", 9), (b"ab", 11))
    pool.free(pool.blocks)
    assert (pool.num_free, len(pool.retained), [b.block_id for b in pool.free_block_queue]) == (4, 3, [2])
    assert allocate_all(pool) == [2, 3, 0, 1]
    assert (pool.num_free, pool.num_cached) == (0, 0)


def test_of_equal_uses_those_freed_first_go_first() -> None:
    pool = filled_pool(b"abc", (b"abc", 1))
    pool.free(reversed(pool.blocks))
    assert allocate_all(pool) == [2, 1, 0]


def test_uses_that_changed_meanwhile_count() -> None:
    pool = filled_pool(b"abc", (b"a", 5), (b"b", 2), (b"c", 4))
    pool.free(pool.blocks)
    pool.expect([b"a"], 1)
    pool.uses.remove([b"c"], 4)
    assert allocate_all(pool) == [2, 1, 0]


def test_a_free_block_that_somebody_asks_for_later_is_retained_then() -> None:
    pool = filled_pool(b"ab")
    pool.free(pool.blocks)
    pool.expect([b"a", b"z"], 3)
    assert ([b.block_id for b in pool.free_block_queue], list(pool.retained)) == ([1], [pool.blocks[0]])


def test_a_hit_and_a_forgotten_name_take_a_block_out() -> None:
    pool = filled_pool(b"ab", (b"ab", 3))
    pool.free(pool.blocks)
    pool.hold(pool.blocks[:1])
    pool.forget_all()
    assert (len(pool.retained), [b.block_id for b in pool.free_block_queue]) == (0, [1])
    pool.free(pool.blocks[:1])
    assert [b.block_id for b in pool.free_block_queue] == [0, 1]


def test_ranks_come_and_go_in_any_order() -> None:
    uses, rng, ranks = FutureUses(), random.Random(0), []
    for _ in range(2000):
        if ranks and rng.random() < 0.5:
            uses.remove([b"x"], ranks.pop(rng.randrange(len(ranks))))
        else:
            ranks.append(rng.randrange(50))
            uses.add([b"x"], ranks[-1])
        assert uses.next_use(b"x") == min(ranks, default=None)
    assert uses.next_use(None) is uses.next_use(b"y") is None


def test_many_blocks_come_and_go() -> None:
    pool = filled_pool(bytes(range(100)), (bytes(range(100)), 1))
    for _ in range(50):
        pool.free(pool.blocks)
        pool.hold(pool.blocks)
    pool.free(pool.blocks)
    assert len(pool.retained._heap) < 300
    assert allocate_all(pool) == list(range(100))
