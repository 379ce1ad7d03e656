"""The plan of a job whose prompts are all known: which runs when, and which need not run at all. Pure functions.

Order: depth first through the tree of prefixes, so that everybody who shares a block follows each other and a prefix is
computed once while its blocks are held; between branches, and between the rows of one, the longest expected output
first, so that short ones fill the tail of the job.

    prompts (blocks)    A B C    A B D    E    A F        order, if E expects most:    E   ABC ABD AF

Prompts are read by index, a bounded number of bytes at a time: they may lie in a file (jobs/tokens.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]
SORT_BYTES = 4 << 20  # prompts that are in memory at once
OBJECT_BYTES = 64  # that a prompt costs besides its own
KEY_BYTES = 15  # of a prompt that its part of a sort is found by
END = b"\x01"  # so that no key ends with a zero, which numpy takes for padding


def plan_order(
    read: Callable[[int], bytes],
    num_bytes: NDArray[np.int32],
    expected_outputs: NDArray[np.int32],
    block_bytes: int,
    indices: Indices | None = None,
) -> tuple[Indices, int]:
    """Indices in the order to run, and how many blocks are shared: those that stand in a prompt before as well.

    read: a prompt's token ids as bytes, of which block_bytes make a block, by its index; num_bytes, expected_outputs:
    of each; indices: of those to order, default all. The last token of a prompt is always computed, so a block that
    holds it does not count as shared. Bytes are compared as they are: any order that keeps equal beginnings together
    is depth first.
    """
    if indices is None:
        indices = np.arange(len(num_bytes), dtype=np.int32)
    by_prefix = np.empty_like(indices)
    num_shared = np.zeros(len(indices), np.int32)  # blocks in common with the one before, in that order
    begin, num_hits, last = 0, 0, b""
    for part in _sorted_parts(read, num_bytes, indices, 0):
        in_line = [read(index) for index in part]
        shared = [_num_shared_blocks(a, b, block_bytes) for a, b in pairwise((last, *in_line))]
        num_hits += sum(map(min, shared, (max(0, len(prompt) - 1) // block_bytes for prompt in in_line)))
        by_prefix[begin : begin + len(part)] = part
        num_shared[begin : begin + len(part)] = shared
        begin, last = begin + len(part), in_line[-1]
    return by_prefix[_longest_first(num_shared, expected_outputs[by_prefix])], num_hits


def find_duplicates(keys: Sequence[Hashable | None]) -> list[int | None]:
    """For each key the index of the first one equal to it, None for a first one and where the key is None."""
    first: dict[Hashable, int] = {}
    duplicate_of: list[int | None] = []
    for index, key in enumerate(keys):
        earlier = index if key is None else first.setdefault(key, index)
        duplicate_of.append(None if earlier == index else earlier)
    return duplicate_of


def _sorted_parts(
    read: Callable[[int], bytes], num_bytes: NDArray[np.int32], indices: Indices, depth: int
) -> Iterator[list[int]]:
    """The indices by their prompts, in parts that fit into SORT_BYTES; all these prompts agree in depth bytes."""
    if num_bytes[indices].sum(dtype=np.int64) + len(indices) * OBJECT_BYTES <= SORT_BYTES:
        if len(indices):
            yield _sorted_by(read, indices)
        return
    heads = (read(index)[depth : depth + KEY_BYTES] + END for index in indices.tolist())
    keys = np.fromiter(heads, f"S{KEY_BYTES + 1}", len(indices))
    order = np.argsort(keys, kind="stable")
    keys, indices = keys[order], indices[order]
    bounds = np.r_[0, 1 + np.flatnonzero(keys[1:] != keys[:-1]), len(keys)]  # of the groups with one key
    del keys, order
    totals = np.r_[
        0, np.cumsum(np.add.reduceat(num_bytes[indices] + np.int32(OBJECT_BYTES), bounds[:-1], dtype=np.int64))
    ]
    first = 0
    while first < len(totals) - 1:
        last = max(first + 1, int(np.searchsorted(totals, totals[first] + SORT_BYTES, side="right")) - 1)
        part = indices[bounds[first] : bounds[last]]
        deeper = depth if totals[last] - totals[first] <= SORT_BYTES else _common_bytes(read, part)
        if deeper > depth:
            yield from _sorted_parts(read, num_bytes, part, deeper)
        else:
            yield _sorted_by(read, part)  # one too large for that holds prompts that all end here
        first = last


def _sorted_by(read: Callable[[int], bytes], indices: Indices) -> list[int]:
    return sorted(indices.tolist(), key=lambda index: read(index) + END)


def _common_bytes(read: Callable[[int], bytes], indices: Indices) -> int:
    """Leading bytes that all of them have."""
    common = read(int(indices[0]))
    for index in indices.tolist():
        prompt = read(index)
        if not prompt.startswith(common):
            common = common[: _num_shared_blocks(common, prompt, 1)]
    return len(common)


def _longest_first(num_shared: NDArray[np.int32], expected: NDArray[np.int32]) -> Indices:
    """Positions in the sorted line, in the order to run: branches by the longest of theirs, all the way down.

    All nodes of one level are split at once, so this takes as many rounds as the tree has levels of branches.
    """
    order = np.empty(len(expected), np.int32)
    begins = np.zeros(min(1, len(expected)), np.int32)  # of the nodes of this level, as positions in the line
    sizes, places = begins + np.int32(len(expected)), begins  # places: where the node begins in the order to run
    while len(begins):
        firsts = np.cumsum(sizes, dtype=np.int32) - sizes
        node = np.repeat(np.arange(len(begins), dtype=np.int32), sizes)
        positions = np.arange(len(node), dtype=np.int32) + (begins - firsts)[node]
        shared = num_shared[positions]
        shared[firsts] = np.iinfo(np.int32).max  # what the first shares with the one before is no matter of this node
        starts = shared == np.minimum.reduceat(shared, firsts)[node]  # a branch begins
        starts[firsts] = True
        branches = np.flatnonzero(starts)
        longest = np.maximum.reduceat(expected[positions], branches)
        by_length = np.lexsort((-longest, node[branches]))
        sizes = np.diff(np.r_[branches, len(node)]).astype(np.int32)[by_length]
        begins, node = positions[branches[by_length]], node[branches[by_length]]
        places = np.cumsum(sizes, dtype=np.int32) - sizes + (places - firsts)[node]
        is_single = sizes == 1
        order[places[is_single]] = begins[is_single]
        begins, sizes, places = begins[~is_single], sizes[~is_single], places[~is_single]
    return order


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
