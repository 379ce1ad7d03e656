"""KVCacheManager: exact block ids, queue order, hits, pending blocks and forks."""

from __future__ import annotations

import pytest

from pagedllm.cache.kv_cache_manager import NO_BLOCK_IDS, ComputedBlocks, KVCacheManager
from pagedllm.request import Request
from tests.engine.fakes import assert_manager_conserved, make_request


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.pool.free_block_queue]


def hit_ids(manager: KVCacheManager, request: Request, limit: int | None = None) -> list[int]:
    limit = len(request.token_ids) - 1 if limit is None else limit
    (blocks,) = manager.get_computed_blocks(request, limit).blocks
    return [block.block_id for block in blocks]


def admit(manager: KVCacheManager, request: Request, num_new_tokens: int | None = None) -> int:
    """Admits and allocates; returns the number of tokens that came from the cache."""
    blocks = manager.get_computed_blocks(request, len(request.token_ids) - 1)
    assert manager.can_admit(request, blocks, 0)
    request.num_computed_tokens = num_cached = manager.admit(request, blocks)
    if num_new_tokens is None:
        num_new_tokens = len(request.token_ids) - num_cached
    assert manager.allocate_slots(request, num_new_tokens) is not None
    return num_cached


def finish_step(manager: KVCacheManager, *requests: Request) -> None:
    manager.publish()
    for request in requests:
        request.num_computed_tokens = len(request.token_ids)
    assert_manager_conserved(manager)


def test_blocks_are_taken_at_block_boundaries_only() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("r", range(3))
    admit(manager, request)
    assert manager.block_ids(request) == ((0,),)
    finish_step(manager, request)
    added = []
    for token_id in range(10):
        request.token_ids.append(token_id)
        added.append(manager.allocate_slots(request, 1))
        finish_step(manager, request)
        assert manager.num_wasted_slots == -len(request.token_ids) % 4
    assert added == [((),), ((1,),), ((),), ((),), ((),), ((2,),), ((),), ((),), ((),), ((3,),)]
    assert manager.block_ids(request) == ((0, 1, 2, 3),)


def test_without_a_free_block_nothing_changes() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    request = make_request("r", range(8))
    admit(manager, request)
    finish_step(manager, request)
    request.token_ids.append(1)
    assert manager.allocate_slots(request, 1) is None
    assert manager.block_ids(request) == ((0, 1),)
    assert manager.num_wasted_slots == 0
    assert_manager_conserved(manager)


def test_of_a_finished_request_the_end_is_taken_before_the_beginning() -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4)
    request = make_request("r", range(10))
    admit(manager, request)
    finish_step(manager, request)
    manager.free(request)
    assert free_ids(manager) == [2, 3, 4, 5, 1, 0]  # 2 is not full, so nobody can hit it
    assert manager.request_ids == ()
    assert manager.num_wasted_slots == 0


def test_a_hit_takes_the_blocks_out_of_the_queue_and_keeps_their_order_in_the_table() -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4)
    first = make_request("first", range(10))
    admit(manager, first)
    finish_step(manager, first)
    manager.free(first)
    second = make_request("second", [*range(8), 50, 51, 52])
    assert hit_ids(manager, second) == [0, 1]
    assert admit(manager, second) == 8
    assert manager.block_ids(second) == ((0, 1, 2),)
    assert free_ids(manager) == [3, 4, 5]


@pytest.mark.parametrize(
    ("num_tokens", "limit", "hits"),
    [(1, 0, []), (3, 2, []), (4, 3, []), (5, 4, [0]), (7, 6, [0]), (8, 7, [0]), (9, 8, [0, 1]), (12, 11, [0, 1]),
     (12, 8, [0, 1]), (12, 7, [0]), (12, 0, [])],
)  # fmt: skip
def test_hits_are_whole_blocks_and_never_pass_the_limit(num_tokens: int, limit: int, hits: list[int]) -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    first = make_request("first", range(12))
    admit(manager, first)
    finish_step(manager, first)
    assert hit_ids(manager, make_request("second", range(num_tokens)), limit) == hits


def test_full_blocks_of_an_output_are_hit_too() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    request = make_request("r", range(3))
    admit(manager, request)
    finish_step(manager, request)
    request.token_ids.append(70)
    assert manager.allocate_slots(request, 1) == NO_BLOCK_IDS
    finish_step(manager, request)
    assert hit_ids(manager, make_request("next", [0, 1, 2, 70, 9])) == [0]
    assert hit_ids(manager, make_request("other", [0, 1, 2, 71, 9])) == []


def test_extra_keys_keep_equal_tokens_apart() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    first = make_request("first", range(8), extra_keys=("adapter", 1))
    admit(manager, first)
    finish_step(manager, first)
    assert hit_ids(manager, make_request("same", range(8), extra_keys=("adapter", 1))) == [0]
    assert hit_ids(manager, make_request("other", range(8), extra_keys=("adapter", 2))) == []


def test_eviction_takes_the_ends_of_chains_before_the_prefix() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    first = make_request("first", range(16))
    admit(manager, first)
    finish_step(manager, first)
    manager.free(first)
    other = make_request("other", range(100, 105))
    admit(manager, other)
    assert manager.block_ids(other) == ((3, 2),)
    assert hit_ids(manager, make_request("again", range(16))) == [0, 1]


def test_without_prefix_caching_nothing_is_hit() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=False)
    first = make_request("first", range(8))
    admit(manager, first)
    finish_step(manager, first)
    assert hit_ids(manager, make_request("second", range(8))) == []
    assert first.block_hashes == []
    assert manager.pool.num_cached == 0


def test_admission_counts_free_blocks_that_a_hit_would_take() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=4)
    first = make_request("first", range(8))
    admit(manager, first)
    finish_step(manager, first)
    manager.free(first)
    second = make_request("second", range(12))
    blocks = manager.get_computed_blocks(second, 11)
    assert [block.block_id for block in blocks.blocks[0]] == [0, 1]
    assert manager.can_admit(second, blocks, num_spare=0)
    assert not manager.can_admit(second, blocks, num_spare=1)
    assert not manager.can_admit(make_request("long", range(13)), ComputedBlocks(0, ([],)), num_spare=0)


def test_a_pending_block_is_hit_in_its_own_step_and_published_after_it() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    owner, user = make_request("owner", range(9)), make_request("user", range(9))
    admit(manager, owner)
    assert [block.is_pending for block in manager.pool.blocks[:3]] == [True, True, False]
    assert admit(manager, user) == 8
    assert manager.block_ids(user) == ((0, 1, 3),)
    manager.publish()
    assert not any(block.is_pending for block in manager.pool.blocks)
    assert manager.withdraw(owner) == []


def test_a_block_is_left_behind_only_once_it_is_published() -> None:
    """The step that fills it is under way while the next plan is made, whose tokens do not see it any more."""
    manager, request = KVCacheManager(8, 4, windows=(2,)), make_request("a", range(14))
    admit(manager, request, 8)
    manager.begin_next_plan()
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 4)
    assert (manager.pool.num_used, manager.pool.blocks[0].is_pending) == (3, True)
    manager.publish()
    request.num_computed_tokens = 12
    manager.allocate_slots(request, 2)
    assert (manager.pool.num_used, manager.pool.blocks[0].ref_count) == (2, 0)


def test_only_the_blocks_of_this_chunk_are_pending() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    owner = make_request("owner", range(12))
    admit(manager, owner, num_new_tokens=7)
    assert hit_ids(manager, make_request("user", range(12))) == [0]
    manager.publish()
    owner.num_computed_tokens = 7
    manager.allocate_slots(owner, 5)
    assert [block.is_pending for block in manager.pool.blocks[:3]] == [False, True, True]


def test_withdrawing_names_those_who_hit_and_those_who_hit_theirs() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    owner = make_request("owner", range(5))
    user = make_request("user", range(9))
    user_of_user = make_request("user_of_user", range(13))
    bystander = make_request("bystander", range(50, 59))
    for request in (owner, user, user_of_user, bystander):
        admit(manager, request)
    assert user_of_user.num_computed_tokens == 8
    assert manager.withdraw(owner) == [user, user_of_user]
    for request in (owner, user, user_of_user):
        manager.free(request)
    assert hit_ids(manager, make_request("again", range(13))) == []
    assert hit_ids(manager, make_request("other", range(50, 59))) == [6, 7]
    manager.publish()
    assert_manager_conserved(manager)


def test_withdrawing_a_user_leaves_the_owner_and_its_blocks() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    owner, user = make_request("owner", range(5)), make_request("user", range(9))
    admit(manager, owner)
    admit(manager, user)
    assert manager.withdraw(user) == []
    manager.free(user)
    assert hit_ids(manager, make_request("again", range(9))) == [0]


def test_pending_blocks_are_not_freed_by_oversight() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("r", range(4))
    admit(manager, request)
    with pytest.raises(AssertionError, match="withdrawn or published first"):
        manager.free(request)


def test_drafts_are_not_offered_to_others() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("r", range(3))
    admit(manager, request)
    finish_step(manager, request)
    request.token_ids.append(9)
    assert manager.allocate_slots(request, 5) == ((1,),)  # one token and four drafts
    assert [block.block_hash is not None for block in manager.pool.blocks] == [True, False, False, False]


def test_forgotten_blocks_are_not_hit() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("r", range(9))
    admit(manager, request)
    finish_step(manager, request)
    manager.forget(request)
    manager.free(request)
    assert hit_ids(manager, make_request("again", range(9))) == []


def test_resetting_the_prefix_cache_forgets_free_and_held_blocks() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    done, running = make_request("done", range(9)), make_request("running", range(50, 59))
    for request in (done, running):
        admit(manager, request)
    finish_step(manager, done, running)
    manager.free(done)
    manager.reset_prefix_cache()
    assert hit_ids(manager, make_request("a", range(9))) == []
    assert hit_ids(manager, make_request("b", range(50, 59))) == []
    assert_manager_conserved(manager)


def fork(manager: KVCacheManager, parent: Request, name: str) -> Request | None:
    child = make_request(name, parent.token_ids)
    child.block_hashes = list(parent.block_hashes)
    child.num_computed_tokens = parent.num_computed_tokens
    return child if manager.fork(parent, child) else None


def test_a_fork_shares_full_blocks_and_copies_the_one_that_is_not_full() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    parent = make_request("parent", range(10))
    admit(manager, parent)
    finish_step(manager, parent)
    child = fork(manager, parent, "child")
    assert child is not None
    assert manager.block_ids(child) == ((0, 1, 3),)
    assert manager.take_blocks_to_copy() == ((2, 3),)
    assert manager.take_blocks_to_copy() == ()
    assert [block.ref_count for block in manager.pool.blocks[:4]] == [2, 2, 1, 1]
    for request, token_id in ((parent, 60), (child, 61)):
        request.token_ids.append(token_id)
        assert manager.allocate_slots(request, 1) == NO_BLOCK_IDS
    assert_manager_conserved(manager)


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    parent = make_request("parent", range(8))
    admit(manager, parent)
    finish_step(manager, parent)
    child = fork(manager, parent, "child")
    assert child is not None
    assert manager.block_ids(child) == ((0, 1),)
    assert manager.take_blocks_to_copy() == ()
    manager.free(parent)
    assert free_ids(manager) == []


def test_a_fork_without_a_free_block_does_nothing() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    parent = make_request("parent", range(7))
    admit(manager, parent)
    finish_step(manager, parent)
    assert fork(manager, parent, "child") is None
    assert manager.request_ids == ("parent",)
    assert_manager_conserved(manager)


def test_a_fork_of_a_fork_copies_from_what_holds_data() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    parent = make_request("parent", range(6))
    admit(manager, parent)
    finish_step(manager, parent)
    child = fork(manager, parent, "child")
    assert child is not None
    assert fork(manager, child, "grandchild") is not None
    assert manager.take_blocks_to_copy() == ((1, 2), (1, 3))


def test_the_source_of_a_copy_outlives_its_request_until_the_copy_is_told() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=4)
    parent = make_request("parent", range(6))
    admit(manager, parent)
    finish_step(manager, parent)
    child = fork(manager, parent, "child")
    assert child is not None
    manager.free(parent)
    assert free_ids(manager) == []
    assert manager.take_blocks_to_copy() == ((1, 2),)
    assert free_ids(manager) == [1]


def test_a_freed_fork_takes_its_copy_with_it() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    parent = make_request("parent", range(6))
    admit(manager, parent)
    finish_step(manager, parent)
    child = fork(manager, parent, "child")
    assert child is not None
    manager.free(child)
    assert manager.take_blocks_to_copy() == ()
    assert_manager_conserved(manager)


def test_a_shared_block_is_never_written() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    parent = make_request("parent", range(6))
    admit(manager, parent)
    finish_step(manager, parent)
    manager.pool.hold((manager.pool.blocks[1],))
    parent.token_ids += range(3)
    with pytest.raises(AssertionError, match="a shared block would be written"):
        manager.allocate_slots(parent, 3)


def test_an_emptied_manager_has_the_same_settings_and_holds_nothing() -> None:
    manager = KVCacheManager(num_blocks=5, block_size=8, enable_prefix_caching=False)
    admit(manager, make_request("r", range(9)))
    emptied = manager.emptied()
    assert (emptied.pool.num_blocks, emptied.block_size, emptied.enable_prefix_caching) == (5, 8, False)
    assert free_ids(emptied) == [0, 1, 2, 3, 4]


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        KVCacheManager(4, 0)


def test_a_user_that_was_freed_already_is_not_named_again() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    first, second, user = (
        make_request("first", range(4)),
        make_request("second", range(8)),
        make_request("user", range(9)),
    )
    for request in (first, second, user):
        admit(manager, request)
    assert second.num_computed_tokens == 4
    assert user.num_computed_tokens == 8
    assert manager.withdraw(second) == [user]
    for request in (second, user):
        manager.free(request)
    assert manager.withdraw(first) == []
