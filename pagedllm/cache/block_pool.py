"""BlockPool: every block of the KV cache, the free ones in two places, and the hash table over full blocks.

Knows blocks and hashes, no requests. A block is held (ref_count > 0), or in the free queue, or retained, because
somebody who waits will ask for it: free + retained + used == total. A free block keeps its hash, and may be hit, until
allocation reaches it. Allocation empties the queue first, and then takes of the retained ones the one that is asked
for last. Where the future is not known, nothing is retained: plain LRU.

    head -> nameless, freed last first | never used | with a hash, freed longest ago first <- tail

Nameless blocks cannot be hit and have been written to: a page that is touched for the first time costs more than the K
and V that go there. A block serves any KV group, one at a time: the table has a part for each, since equal tokens have
other K and V there. Called by KVCacheManager only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedllm.cache.block import FreeBlockQueue, KVCacheBlock
from pagedllm.cache.future_uses import FutureUses, RetainedBlocks


class BlockPool:
    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeBlockQueue(self.blocks)
        self.uses = FutureUses()
        self.retained = RetainedBlocks(self.uses)
        self._cached_blocks: tuple[dict[bytes, KVCacheBlock], ...] = tuple({} for _ in range(num_groups))

    @property
    def num_free(self) -> int:
        """Those that can be allocated: in the queue or retained."""
        return len(self.free_block_queue) + len(self.retained)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._cached_blocks))

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Blocks with ref_count 1 and no hash; the caller has checked that so many are free."""
        queue = self.free_block_queue
        num_queued = min(num_blocks, len(queue))
        blocks = [queue.popleft() for _ in range(num_queued)]
        blocks += [self.retained.pop_furthest() for _ in range(num_blocks - num_queued)]
        for block in blocks:
            block.ref_count = 1
            self.forget(block)
        return blocks

    def hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more holder for each; a free one leaves its place."""
        for block in blocks:
            if block.ref_count == 0:
                self._take_out(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One holder less for each; what has none any more is free: see the module for where, in the order given."""
        for block in blocks:
            assert block.ref_count > 0, f"block {block.block_id} is freed by nobody who holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                next_use = self.uses.next_use(block.block_hash)
                if block.block_hash is None:
                    self.free_block_queue.prepend(block)
                elif next_use is None:
                    self.free_block_queue.append(block)
                else:
                    self.retained.add(block, next_use)

    def _take_out(self, block: KVCacheBlock) -> None:
        (self.retained if block in self.retained else self.free_block_queue).remove(block)

    def expect(self, block_hashes: Sequence[bytes], rank: int) -> None:
        """Somebody with this rank will ask for these: those that are free already are retained from now on."""
        self.uses.add(block_hashes, rank)
        for block_hash in block_hashes:
            for cached_blocks in self._cached_blocks:
                block = cached_blocks.get(block_hash)
                if block is not None and block.ref_count == 0 and block not in self.retained:
                    self.free_block_queue.remove(block)
                    self.retained.add(block, rank)

    def find(self, block_hash: bytes, group: int = 0) -> KVCacheBlock | None:
        return self._cached_blocks[group].get(block_hash)

    def offer(self, block: KVCacheBlock, block_hash: bytes, group: int = 0) -> bool:
        """Enters a full block into the hash table as pending; False where another block has that content already."""
        cached_blocks = self._cached_blocks[group]
        if block_hash in cached_blocks:
            return False
        cached_blocks[block_hash] = block
        block.block_hash, block.group = block_hash, group
        block.is_pending = True
        return True

    def forget(self, block: KVCacheBlock) -> None:
        """Takes a block out of the hash table; it is free or held as before."""
        if block.block_hash is not None:
            if block.ref_count == 0:
                self._take_out(block)
                self.free_block_queue.prepend(block)
            del self._cached_blocks[block.group][block.block_hash]
            block.block_hash = None
            block.is_pending = False

    def forget_content(self, block_hash: bytes) -> None:
        """`forget` for all that have this name, in any group."""
        for cached_blocks in self._cached_blocks:
            block = cached_blocks.get(block_hash)
            if block is not None:
                self.forget(block)

    def forget_all(self) -> None:
        for cached_blocks in self._cached_blocks:
            for block in list(cached_blocks.values()):
                self.forget(block)
