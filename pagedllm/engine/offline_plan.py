"""The plan of a job whose prompts are all known: which runs when, and which need not run at all. Pure functions.

Order: depth first through the tree of prefixes, so that everybody who shares a block follows each other and a prefix is
computed once while its blocks are held; between branches, and between the rows of one, the longest expected output
first, so that short ones fill the tail of the job.

    prompts (blocks)    A B C    A B D    E    A F        order, if E expects most:    E   ABC ABD AF
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise


def plan_order(prompts: Sequence[bytes], expected_outputs: Sequence[int], block_bytes: int) -> list[int]:
    """Indices in the order to run. prompts: token ids as bytes, of which block_bytes make a block.

    Bytes are compared as they are: any order that keeps equal beginnings together is depth first.
    """
    if not prompts:
        return []
    by_prefix = sorted(range(len(prompts)), key=prompts.__getitem__)
    in_line = [prompts[index] for index in by_prefix]
    num_shared = [0, *(_num_shared_blocks(a, b, block_bytes) for a, b in pairwise(in_line))]  # with the one before
    expected = [expected_outputs[index] for index in by_prefix]
    order: list[int] = []
    branches = [(0, len(by_prefix))]
    while branches:
        begin, end = branches.pop()
        if end - begin == 1:
            order.append(by_prefix[begin])
            continue
        depth = min(num_shared[begin + 1 : end])
        bounds = [begin, *(i for i in range(begin + 1, end) if num_shared[i] == depth), end]
        children = list(pairwise(bounds))
        children.sort(key=lambda child: -max(expected[child[0] : child[1]]))
        branches += reversed(children)
    return order


def find_duplicates(keys: Sequence[Hashable | None]) -> list[int | None]:
    """For each key the index of the first one equal to it, None for a first one and where the key is None."""
    first: dict[Hashable, int] = {}
    duplicate_of: list[int | None] = []
    for index, key in enumerate(keys):
        earlier = index if key is None else first.setdefault(key, index)
        duplicate_of.append(None if earlier == index else earlier)
    return duplicate_of


def _num_shared_blocks(a: bytes, b: bytes, block_bytes: int) -> int:
    if a[:block_bytes] != b[:block_bytes]:
        return 0
    low, high = 0, min(len(a), len(b)) // block_bytes  # low are shared, more than high are not
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * block_bytes] == b[: middle * block_bytes]:
            low = middle
        else:
            high = middle - 1
    return low
