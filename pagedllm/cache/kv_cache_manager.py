"""KVCacheManager: the only owner of requests' blocks.

Knows which blocks hold which request's K and V, what can be shared, and what a plan must copy; decides nobody's turn.
Called by the Scheduler. Block ids are tuples over KV groups everywhere outside this file; there is one group today, and
a second changes this file only.

A request's table while its block 2 is being filled, block_size 4:

    blocks         [ 7 ]      [ 3 ]      [ 5 ]
    slots       0 1 2 3    4 5 6 7    8 9 . .      num_filled = 10: positions that have or get K and V in this step
    hash table     yes        yes        no        only full blocks are offered, as pending until the step succeeded

**Pending blocks.** A block that the step being scheduled fills is in the hash table already, and a request admitted in
the same step may hit it: K and V of the whole batch are written before attention reads them, in each layer. `publish`
makes them ordinary after a successful step. Where the owner does not compute them after all (preempted later in the
same schedule, or failed), `withdraw` takes them back and names everyone who counted on them, and on those.

No kernel writes to a block with two holders: full blocks are never written, and `fork` copies the one that is not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedllm.cache.block import KVCacheBlock
from pagedllm.cache.block_hash import HashFunction, extend_block_hashes, strong_hash
from pagedllm.cache.block_pool import BlockPool
from pagedllm.request import Request

BlockIds = tuple[tuple[int, ...], ...]  # per KV group
NO_BLOCK_IDS: BlockIds = ((),)


@dataclass(slots=True, eq=False)
class _Table:
    blocks: list[KVCacheBlock]
    num_filled: int
    num_offered: int  # leading blocks that need not be offered to the hash table any more
    next_event: int = 0  # filling fewer positions than this takes no block and completes none


class KVCacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = strong_hash,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self._tables: dict[str, _Table] = {}
        self._pending: dict[str, list[KVCacheBlock]] = {}  # by owner's request id
        self._pending_users: dict[KVCacheBlock, list[Request]] = {}
        self._copies: dict[KVCacheBlock, KVCacheBlock] = {}  # target -> source, which is held until it is told
        self._expected: dict[str, tuple[list[bytes], int]] = {}  # by request id: blocks it will ask for, its rank
        self._num_table_slots = 0  # of all tables, shared blocks counted for each holder
        self._num_filled_slots = 0

    def emptied(self) -> KVCacheManager:
        """A manager with the same settings that holds nothing: the way out of a torn state."""
        return KVCacheManager(
            self.pool.num_blocks,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            hash_function=self.hash_function,
        )

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_wasted_slots(self) -> int:
        """Slots in tables without a token; at most block_size - 1 a request."""
        return self._num_table_slots - self._num_filled_slots

    @property
    def request_ids(self) -> Sequence[str]:
        """Who holds blocks."""
        return tuple(self._tables)

    def block_ids(self, request: Request) -> BlockIds:
        """The whole table."""
        return (tuple([block.block_id for block in self._tables[request.request_id].blocks]),)

    def _finds_blocks(self, request: Request) -> bool:
        """By their hashes. Without a prefix cache only the samples of one prompt do; `extra_keys` keep others away."""
        return self.enable_prefix_caching or request.shares_blocks

    # Who waits

    def expect(self, request: Request) -> None:
        """Retains what the request will ask for, until it is admitted or `stop_expecting`; by its rank."""
        if self._finds_blocks(request):
            extend_block_hashes(request, self.block_size, self.hash_function)
            block_hashes = request.block_hashes[: request.first_logits_index // self.block_size]
            self._expected[request.request_id] = block_hashes, request.rank
            self.pool.expect(block_hashes, request.rank)

    def stop_expecting(self, request: Request) -> None:
        """Nothing is done for a request that is not expected."""
        block_hashes, rank = self._expected.pop(request.request_id, ([], 0))
        self.pool.uses.remove(block_hashes, rank)

    # Admission

    def get_computed_blocks(self, request: Request, max_num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """Leading blocks of the request that are in the cache already, no more than max_num_tokens; holds nothing."""
        if not self._finds_blocks(request):
            return ([],)
        extend_block_hashes(request, self.block_size, self.hash_function)
        blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: max_num_tokens // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return (blocks,)

    def can_admit(self, request: Request, computed_blocks: tuple[list[KVCacheBlock], ...], num_spare: int) -> bool:
        """Whether all tokens that the request has now fit, with num_spare blocks left for the others."""
        (hits,) = computed_blocks
        num_blocks = -(-len(request.token_ids) // self.block_size)
        num_taken = num_blocks - len(hits) + sum(block.ref_count == 0 for block in hits)
        return num_taken + num_spare <= self.pool.num_free

    def admit(self, request: Request, computed_blocks: tuple[list[KVCacheBlock], ...]) -> int:
        """Gives the request a table that begins with these blocks; returns how many tokens they hold."""
        (hits,) = computed_blocks
        assert request.request_id not in self._tables
        self.stop_expecting(request)
        self.pool.hold(hits)
        for block in hits:
            if block.is_pending:
                self._pending_users.setdefault(block, []).append(request)
        num_tokens = len(hits) * self.block_size
        self._tables[request.request_id] = _Table(list(hits), num_tokens, len(hits))
        self._num_table_slots += num_tokens
        self._num_filled_slots += num_tokens
        return num_tokens

    # A step

    def allocate_slots(self, request: Request, num_new_tokens: int) -> BlockIds | None:
        """Slots for the next tokens: ids of the blocks added for them, or None, and nothing done, if too few are free.

        Costs nothing while the last block has room: 15 of 16 decode steps return here.
        """
        table = self._tables[request.request_id]
        end = request.num_computed_tokens + num_new_tokens
        if end >= table.next_event:
            return self._grow(request, table, end)
        self._num_filled_slots += end - table.num_filled
        table.num_filled = end
        return NO_BLOCK_IDS

    def _grow(self, request: Request, table: _Table, end: int) -> BlockIds | None:
        num_blocks = -(-end // self.block_size)
        num_added = num_blocks - len(table.blocks)
        if num_added > self.pool.num_free:
            return None
        added = self.pool.allocate(num_added)
        table.blocks += added
        first_written = request.num_computed_tokens // self.block_size
        assert all(block.ref_count == 1 for block in table.blocks[first_written:]), "a shared block would be written"
        self._num_table_slots += len(added) * self.block_size
        self._num_filled_slots += end - table.num_filled
        table.num_filled = end
        table.next_event = num_blocks * self.block_size + 1
        if self._finds_blocks(request):
            self._offer_full_blocks(request, table)
            if end < num_blocks * self.block_size:
                table.next_event -= 1  # to offer the last block once it is full
        return (tuple([block.block_id for block in added]),)

    def _offer_full_blocks(self, request: Request, table: _Table) -> None:
        """Full of known tokens, that is: drafts are not."""
        num_full = min(table.num_filled, len(request.token_ids)) // self.block_size
        if num_full <= table.num_offered:
            return
        extend_block_hashes(request, self.block_size, self.hash_function)
        for i in range(table.num_offered, num_full):
            if self.pool.offer(table.blocks[i], request.block_hashes[i]):
                self._pending.setdefault(request.request_id, []).append(table.blocks[i])
        table.num_offered = num_full

    def publish(self) -> None:
        """The step succeeded: what was pending holds K and V now."""
        for blocks in self._pending.values():
            for block in blocks:
                block.is_pending = False
        self._pending.clear()
        self._pending_users.clear()

    def withdraw(self, request: Request) -> list[Request]:
        """Takes back what the request made pending; returns those who hit that, those who hit theirs, and so on.

        The caller must free all of them: their tables hold blocks that this step does not fill.
        """
        withdrawn = [request]
        for owner in withdrawn:
            for block in self._pending.pop(owner.request_id, ()):
                self.pool.forget(block)
                users = self._pending_users.pop(block, ())
                withdrawn.extend(user for user in users if user not in withdrawn)
        return withdrawn[1:]

    # The end

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, last block first: ends of chains are evicted before prefixes."""
        assert request.request_id not in self._pending, "blocks that are pending are withdrawn or published first"
        table = self._tables.pop(request.request_id)
        self._num_table_slots -= len(table.blocks) * self.block_size
        self._num_filled_slots -= table.num_filled
        for block in table.blocks if self._copies or self._pending_users else ():
            if block in self._copies:
                self.pool.free((self._copies.pop(block),))
            if block in self._pending_users and request in self._pending_users[block]:
                self._pending_users[block].remove(request)
        self.pool.free(reversed(table.blocks))

    def forget(self, request: Request) -> None:
        """Nobody shall hit what this request computed: its logits were not finite."""
        for block in self._tables[request.request_id].blocks:
            self.pool.forget(block)

    def reset_prefix_cache(self) -> None:
        """Nothing that is cached now will be hit; no step may be under way."""
        assert not self._pending
        self.pool.forget_all()

    # Forks

    def fork(self, parent: Request, child: Request) -> bool:
        """The child shares the parent's full blocks and gets a copy of the one that is not full.

        Both would write to that one in the next step, so it is copied at once, and the parent's table stays as the
        runner knows it. False, and nothing done, if no block is free. Called after a step was published; the child has
        the parent's tokens, hashes and num_computed_tokens.
        """
        assert child.request_id not in self._tables
        table = self._tables[parent.request_id]
        num_full, num_rest = divmod(table.num_filled, self.block_size)
        if num_rest and self.pool.num_free == 0:
            return False
        blocks = table.blocks[:num_full]
        self.pool.hold(blocks)
        if num_rest:
            (target,) = self.pool.allocate(1)
            source = table.blocks[num_full]
            source = self._copies.get(source, source)  # a copy that is not made yet: take what it is made of
            self.pool.hold((source,))
            self._copies[target] = source
            blocks.append(target)
        self._tables[child.request_id] = _Table(blocks, table.num_filled, min(table.num_offered, num_full))
        self._num_table_slots += len(blocks) * self.block_size
        self._num_filled_slots += table.num_filled
        return True

    def take_blocks_to_copy(self) -> tuple[tuple[int, int], ...]:
        """(from, to) for the next plan, which copies before anything else. Targets are distinct and no source."""
        if not self._copies:
            return ()
        pairs = tuple((source.block_id, target.block_id) for target, source in self._copies.items())
        self.pool.free(self._copies.values())
        self._copies.clear()
        return pairs
