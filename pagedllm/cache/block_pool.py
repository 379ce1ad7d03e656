"""BlockPool: every block of the KV cache, the free queue, and the hash table over full blocks.

Knows blocks and hashes, no requests. A block is held (ref_count > 0) or in the free queue, never both:
free + used == total. A free block keeps its hash, and may be hit, until allocation reaches it; allocation takes the
head of the queue and so evicts the block that was freed longest ago. Called by KVCacheManager only.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedllm.cache.block import FreeBlockQueue, KVCacheBlock


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeBlockQueue(self.blocks)
        self._cached_blocks: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_block_queue)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free_block_queue)

    @property
    def num_cached(self) -> int:
        return len(self._cached_blocks)

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Blocks with ref_count 1 and no hash; the caller has checked that so many are free."""
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            if block.block_hash is not None:
                self.forget(block)
            block.ref_count = 1
        return blocks

    def hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more holder for each; a free one leaves the queue."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_block_queue.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One holder less for each; those without any go to the queue's tail, in the order given."""
        for block in blocks:
            assert block.ref_count > 0, f"block {block.block_id} is freed by nobody who holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_queue.append(block)

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        return self._cached_blocks.get(block_hash)

    def offer(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Enters a full block into the hash table as pending; False where another block has that content already."""
        if block_hash in self._cached_blocks:
            return False
        self._cached_blocks[block_hash] = block
        block.block_hash = block_hash
        block.is_pending = True
        return True

    def forget(self, block: KVCacheBlock) -> None:
        """Takes a block out of the hash table; it stays where it is otherwise."""
        if block.block_hash is not None:
            del self._cached_blocks[block.block_hash]
            block.block_hash = None
            block.is_pending = False

    def forget_all(self) -> None:
        for block in list(self._cached_blocks.values()):
            self.forget(block)
