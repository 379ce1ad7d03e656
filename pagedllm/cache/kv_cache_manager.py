"""KVCacheManager: the only owner of requests' blocks.

Knows which blocks hold which request's K and V, what can be shared, and what a plan must copy; decides nobody's turn.
Called by the Scheduler. Block ids are tuples over KV groups everywhere; kv_groups.py says what groups are.

A request's table while its block 2 is being filled, block_size 4, a second group with a window of 5:

    group 0        [ 7 ]      [ 3 ]      [ 5 ]
    group 1        left       [ 9 ]      [ 2 ]     given back once no token to come sees any of it
    slots       0 1 2 3    4 5 6 7    8 9 . .      num_filled = 10: positions that have or get K and V in this step
    hash table     yes        yes        no        only full blocks are offered, as pending until the step succeeded

Outside, NO_BLOCK stands in the place of a block that was left behind. The runner's row may go on naming the old one,
which is somebody else's by now: kernels read nothing that a window hides.

**Hits.** A group with a window needs only the blocks that the first token to be computed sees; all others need all. So
a hit ends where every group has what it needs, and what it gives is exact. A block left behind keeps its name, like
one of a finished request, until it is taken.

**Pending blocks.** A block that the step being scheduled fills is in the hash table already, and a request admitted in
the same step may hit it: K and V of the whole batch are written before attention reads them, in each layer. `publish`
makes them ordinary after a successful step. Where the owner does not compute them after all (preempted later in the
same schedule, or failed), `withdraw` takes them back and names everyone who counted on them, and on those. While a
step is under way, another plan may be made (`begin_next_plan`): it may hit what is pending, since its step comes after,
and what it makes pending itself is published after it.

No kernel writes to a block with two holders: full blocks are never written, and `fork` copies the one that is not full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedllm.cache.block import KVCacheBlock
from pagedllm.cache.block_hash import HashFunction, extend_block_hashes, strong_hash
from pagedllm.cache.block_pool import BlockPool
from pagedllm.kv_groups import UNBOUNDED, KVGroups
from pagedllm.request import Request

BlockIds = tuple[tuple[int, ...], ...]  # per KV group
NO_BLOCK_IDS: BlockIds = ((),)
NO_BLOCK = 0  # any id that exists


class ComputedBlocks(NamedTuple):
    num_blocks: int  # leading ones of a request that need not be computed
    blocks: tuple[list[KVCacheBlock], ...]  # per KV group: those of them that it needs, the last ones


@dataclass(slots=True, eq=False)
class _Table:
    num_blocks: int  # in every group, with those left behind
    blocks: tuple[list[KVCacheBlock], ...]  # per KV group: those still held, the last ones
    num_filled: int
    num_offered: int  # leading blocks that need not be offered to the hash table any more
    next_event: int = 0  # filling fewer positions than this takes no block and completes none

    def from_the_end(self) -> Iterator[KVCacheBlock]:
        """Last blocks first, those of all groups together."""
        for distance in range(1, 1 + max(map(len, self.blocks))):
            for blocks in self.blocks:
                if distance <= len(blocks):
                    yield blocks[-distance]


class KVCacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[int, ...] = (0,),
        max_num_new_tokens: int = UNBOUNDED,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = strong_hash,
    ) -> None:
        """windows: per KV group, 0 for none; max_num_new_tokens: that a request is given slots for in one step."""
        self.groups = KVGroups(block_size, windows, max_num_new_tokens)
        self.pool = BlockPool(num_blocks, len(windows))
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self._tables: dict[str, _Table] = {}
        # Of each plan that is not published, the earliest first: what it made pending, by owner's request id.
        self._pending: deque[dict[str, list[KVCacheBlock]]] = deque([{}])
        self._pending_users: dict[KVCacheBlock, list[Request]] = {}
        self._copies: dict[KVCacheBlock, KVCacheBlock] = {}  # target -> source, which is held until it is told
        self._expected: dict[str, tuple[list[bytes], int]] = {}  # by request id: blocks it will ask for, its rank
        self._num_table_slots = 0  # of all tables in one group, shared blocks counted for each holder
        self._num_filled_slots = 0

    def emptied(self) -> KVCacheManager:
        """A manager with the same settings that holds nothing: the way out of a torn state."""
        return KVCacheManager(
            self.pool.num_blocks,
            self.block_size,
            windows=self.groups.windows,
            max_num_new_tokens=self.groups.max_num_new_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            hash_function=self.hash_function,
        )

    @property
    def num_slots(self) -> int:
        """Tokens of the longest text that the whole pool can hold."""
        return self.groups.longest_text(self.pool.num_blocks)

    @property
    def num_wasted_slots(self) -> int:
        """Slots in tables without a token; at most block_size - 1 a request and group."""
        return (self._num_table_slots - self._num_filled_slots) * len(self.groups)

    @property
    def request_ids(self) -> Sequence[str]:
        """Who holds blocks."""
        return tuple(self._tables)

    def block_ids(self, request: Request) -> BlockIds:
        """The whole table."""
        table = self._tables[request.request_id]
        return tuple(
            (NO_BLOCK,) * (table.num_blocks - len(blocks)) + tuple([block.block_id for block in blocks])
            for blocks in table.blocks
        )

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

    def get_computed_blocks(self, request: Request, max_num_tokens: int) -> ComputedBlocks:
        """Leading blocks of the request that are in the cache already, no more than max_num_tokens; holds nothing."""
        groups = range(len(self.groups))
        if not self._finds_blocks(request):
            return ComputedBlocks(0, tuple([] for _ in groups))
        extend_block_hashes(request, self.block_size, self.hash_function)
        block_hashes = request.block_hashes[: max_num_tokens // self.block_size]
        num_blocks, longer = len(block_hashes), None
        while num_blocks != longer:  # until all groups agree
            longer = num_blocks
            for group in groups:
                num_blocks = self._longest_hit(block_hashes, group, num_blocks)
        found: list[list[KVCacheBlock]] = []
        for group in groups:
            needed = block_hashes[self.groups.num_left_behind(group, num_blocks * self.block_size) : num_blocks]
            found.append([block for name in needed if (block := self.pool.find(name, group)) is not None])
        return ComputedBlocks(num_blocks, tuple(found))

    def _longest_hit(self, block_hashes: Sequence[bytes], group: int, limit: int) -> int:
        """The most leading blocks, up to limit, of which the cache has all that this group needs."""
        if not self.groups.windows[group]:
            return next((i for i in range(limit) if self.pool.find(block_hashes[i], group) is None), limit)
        num_blocks = first_found = limit
        while first_found > self.groups.num_left_behind(group, num_blocks * self.block_size):
            first_found -= 1
            if self.pool.find(block_hashes[first_found], group) is None:
                num_blocks = first_found
        return num_blocks

    def can_admit(self, request: Request, computed_blocks: ComputedBlocks, num_spare: int) -> bool:
        """Whether all tokens that the request has now fit, with num_spare blocks left for the others."""
        num_taken = self.groups.num_blocks(len(request.token_ids))
        for hits in computed_blocks.blocks:
            num_taken += sum(block.ref_count == 0 for block in hits) - len(hits)
        return num_taken + num_spare <= self.pool.num_free

    def admit(self, request: Request, computed_blocks: ComputedBlocks) -> int:
        """Gives the request a table that begins with these blocks; returns how many tokens they hold."""
        num_blocks, blocks = computed_blocks
        assert request.request_id not in self._tables
        self.stop_expecting(request)
        for hits in blocks:
            self.pool.hold(hits)
            for block in hits:
                if block.is_pending:
                    self._pending_users.setdefault(block, []).append(request)
        num_tokens = num_blocks * self.block_size
        self._tables[request.request_id] = _Table(num_blocks, tuple(map(list, blocks)), num_tokens, num_blocks)
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

    def num_blocks_wanted(self, request: Request, num_new_tokens: int) -> int:
        """That `allocate_slots` would take, at most."""
        num_blocks = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, num_blocks - self._tables[request.request_id].num_blocks) * len(self.groups)

    def _grow(self, request: Request, table: _Table, end: int) -> BlockIds | None:
        num_blocks = -(-end // self.block_size)
        num_added = num_blocks - table.num_blocks
        self._leave_behind(table, request.num_computed_tokens)
        if num_added * len(self.groups) > self.pool.num_free:
            return None
        first_written = request.num_computed_tokens // self.block_size
        block_ids = []
        for blocks in table.blocks:
            added = self.pool.allocate(num_added)
            block_ids.append(tuple([block.block_id for block in added]))
            blocks += added
            written = blocks[len(blocks) - (num_blocks - first_written) :]
            assert all(block.ref_count == 1 for block in written), "a shared block would be written"
        self._num_table_slots += num_added * self.block_size
        self._num_filled_slots += end - table.num_filled
        table.num_blocks, table.num_filled = num_blocks, end
        table.next_event = num_blocks * self.block_size + 1
        if self._finds_blocks(request):
            self._offer_full_blocks(request, table)
            if end < num_blocks * self.block_size:
                table.next_event -= 1  # to offer the last block once it is full
        return tuple(block_ids)

    def _leave_behind(self, table: _Table, num_computed_tokens: int) -> None:
        """Gives back what no token to come sees, but for blocks that the step under way, if there is one, has not
        published: a pending block always has its owner."""
        for group, blocks in enumerate(table.blocks):
            num_left = self.groups.num_left_behind(group, num_computed_tokens) - (table.num_blocks - len(blocks))
            if num_left > 0:
                num_left = next((i for i in range(num_left) if blocks[i].is_pending), num_left)
                self.pool.free(blocks[:num_left])
                del blocks[:num_left]

    def _offer_full_blocks(self, request: Request, table: _Table) -> None:
        """Full of known tokens, that is: drafts are not, nor is a token that a step under way draws."""
        num_full = min(table.num_filled, len(request.token_ids)) // self.block_size
        if num_full <= table.num_offered:
            return
        extend_block_hashes(request, self.block_size, self.hash_function)
        for group, blocks in enumerate(table.blocks):
            first = table.num_blocks - len(blocks)
            for i in range(table.num_offered, num_full):
                if self.pool.offer(blocks[i - first], request.block_hashes[i], group):
                    self._pending[-1].setdefault(request.request_id, []).append(blocks[i - first])
        table.num_offered = num_full

    def begin_next_plan(self) -> None:
        """Another plan is made before the present one is published."""
        self._pending.append({})

    def publish(self) -> None:
        """The step of the earliest plan succeeded: what it made pending holds K and V now."""
        for blocks in self._pending.popleft().values():
            self._make_ordinary(blocks)
        if not self._pending:
            self._pending.append({})

    def publish_early(self, request: Request) -> None:
        """Publishes what a request that just ended made pending in a plan whose step is still under way.

        It had sampled in the step before, so all that it has to compute there is that one token, which was not known
        when the plan was made: its block was not offered, and those that were have been full since the step before.
        """
        for pending in self._pending:
            self._make_ordinary(pending.pop(request.request_id, ()))

    def _make_ordinary(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            block.is_pending = False
            self._pending_users.pop(block, None)

    def withdraw(self, request: Request) -> list[Request]:
        """Takes back what the request made pending; returns those who hit that, those who hit theirs, and so on.

        The caller must free all of them: their tables hold blocks that this step does not fill.
        """
        withdrawn = [request]
        for owner in withdrawn:
            for block in [block for pending in self._pending for block in pending.pop(owner.request_id, ())]:
                self.pool.forget(block)
                users = self._pending_users.pop(block, ())
                withdrawn.extend(user for user in users if user not in withdrawn)
        return withdrawn[1:]

    # The end

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, last block first: ends of chains are evicted before prefixes."""
        is_pending = any(request.request_id in pending for pending in self._pending)
        assert not is_pending, "blocks that are pending are withdrawn or published first"
        table = self._tables.pop(request.request_id)
        self._num_table_slots -= table.num_blocks * self.block_size
        self._num_filled_slots -= table.num_filled
        for block in table.from_the_end() if self._copies or self._pending_users else ():
            if block in self._copies:
                self.pool.free((self._copies.pop(block),))
            if block in self._pending_users and request in self._pending_users[block]:
                self._pending_users[block].remove(request)
        self.pool.free(table.from_the_end())

    def forget(self, request: Request) -> None:
        """Nobody shall hit what this request computed, and left behind: its logits were not finite."""
        for block_hash in request.block_hashes[: self._tables[request.request_id].num_offered]:
            self.pool.forget_content(block_hash)

    def reset_prefix_cache(self) -> None:
        """Nothing that is cached now will be hit; no step may be under way."""
        assert not any(self._pending)
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
        if num_rest and self.pool.num_free < len(self.groups):
            return False
        shared = tuple(blocks[: len(blocks) - bool(num_rest)] for blocks in table.blocks)
        for blocks, own in zip(shared, table.blocks, strict=True):
            self.pool.hold(blocks)
            if num_rest:
                (target,) = self.pool.allocate(1)
                source = own[-1]
                source = self._copies.get(source, source)  # a copy that is not made yet: take what it is made of
                self.pool.hold((source,))
                self._copies[target] = source
                blocks.append(target)
        num_offered = min(table.num_offered, num_full)
        self._tables[child.request_id] = _Table(table.num_blocks, shared, table.num_filled, num_offered)
        self._num_table_slots += table.num_blocks * self.block_size
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
