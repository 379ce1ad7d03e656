"""KVGroups: how many blocks a text takes where some layers see only a window of it. Arithmetic, known to both sides.

Layers are divided into groups of equal size, and a block holds `block_size` tokens of one group's layers, so blocks of
all groups are equally large and lie in one pool: what one group gives back another one takes. A group with a window
keeps only blocks that a token still to be computed can see.

    window 5, block_size 4, 10 tokens computed: token 10 sees 6 .. 10          group 0 (no window)  [ 7 ][ 3 ][ 5 ]
    blocks that end before 6 are left behind                                   group 1 (window 5)    left [ 9 ][ 2 ]
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass

UNBOUNDED = sys.maxsize


@dataclass(frozen=True, slots=True)
class KVGroups:
    block_size: int
    windows: tuple[int, ...] = (0,)  # per group; 0: all tokens before are seen
    max_num_new_tokens: int = UNBOUNDED  # that one text gets in one step: blocks they need lie there together

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not self.windows or min(self.windows) < 0:
            raise ValueError(f"windows must be numbers >= 0, at least one, got {self.windows!r}")

    def __len__(self) -> int:
        return len(self.windows)

    def num_left_behind(self, group: int, num_computed_tokens: int) -> int:
        """Leading blocks that no token from num_computed_tokens on sees."""
        window = self.windows[group]
        return max(0, num_computed_tokens + 1 - window) // self.block_size if window else 0

    def num_blocks(self, num_tokens: int) -> int:
        """The most blocks that a text holds at once, in all groups together, while it grows to num_tokens."""
        num_whole = -(-num_tokens // self.block_size)
        return sum(min(num_whole, self._most_blocks(window)) for window in self.windows)

    def num_blocks_ahead(self, num_tokens: int, num_to_come: int) -> int:
        """That a text takes besides those of its num_tokens, until num_to_come more are there; at least one a group."""
        return max(len(self), self.num_blocks(num_tokens + num_to_come) - self.num_blocks(num_tokens))

    def num_blocks_of_branches(self, num_shared_tokens: int, num_tokens: int, num_branches: int) -> int:
        """As `num_blocks`, of texts that share the full blocks of their first tokens."""
        num_shared, num_whole = num_shared_tokens // self.block_size, -(-num_tokens // self.block_size)
        num_kept = num_shared + num_branches * (num_whole - num_shared)
        return sum(min(num_kept, num_branches * self._most_blocks(window)) for window in self.windows)

    def longest_text(self, num_blocks: int) -> int:
        """The most tokens of a text that needs no more than num_blocks; UNBOUNDED where windows are all it needs."""
        if sum(map(self._most_blocks, self.windows)) <= num_blocks:
            return UNBOUNDED
        lengths = range(self.block_size, (num_blocks + 1) * self.block_size, self.block_size)
        return bisect_right(lengths, num_blocks, key=self.num_blocks) * self.block_size

    def _most_blocks(self, window: int) -> int:
        """Of one group, however long the text; the tokens of a step and the window before them may begin anywhere."""
        if not window:
            return UNBOUNDED
        num_seen = window - 1 + self.max_num_new_tokens
        return (num_seen + self.block_size - 2) // self.block_size + 1
