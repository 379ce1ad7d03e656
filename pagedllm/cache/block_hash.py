"""The names of full blocks: a chained 128-bit hash, so that equal names mean equal prefixes.

    root = H(extra_keys)        name of block i = H(name of block i - 1, token ids of block i)

A name therefore stands for everything before it: tokens, depth, adapter, rope variant, salt. **The strong hash alone
counts**: nothing compares token ids on a hit. BLAKE2b at 128 bits makes an accident impossible in practice (2^40
blocks: one chance in 2^49); a deliberate collision costs 2^64 hashes, and callers who share an engine between parties
that distrust each other give each its own salt in `extra_keys`. Tests weaken `hash_function` to prove that they would
see a wrong hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

from pagedllm.request import Request

HashFunction = Callable[[bytes], bytes]
HASH_BYTES = 16


def strong_hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


def root_hash(extra_keys: tuple[object, ...], hash_function: HashFunction = strong_hash) -> bytes:
    """The parent of a first block. Keys are str, bytes, int, bool or None, whose repr is exact."""
    for key in extra_keys:
        if type(key) not in (str, bytes, int, bool, type(None)):
            raise TypeError(f"extra_keys must be str, bytes, int, bool or None, got {key!r}")
    return hash_function(b"extra_keys:" + repr(extra_keys).encode())


def extend_block_hashes(request: Request, block_size: int, hash_function: HashFunction = strong_hash) -> None:
    """Brings `request.block_hashes` up to the full blocks of `request.token_ids`; never recomputes one."""
    hashes, token_ids = request.block_hashes, request.token_ids
    num_full_blocks = len(token_ids) // block_size
    if len(hashes) >= num_full_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.extra_keys, hash_function)
    for begin in range(len(hashes) * block_size, num_full_blocks * block_size, block_size):
        parent = hash_function(parent + array("i", token_ids[begin : begin + block_size]).tobytes())
        hashes.append(parent)
