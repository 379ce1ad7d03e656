"""What a row is known by: its content, never its line number.

    key = H(final prompt ids, the row's own sampling_params)
    id  = H(key, how many equal rows came before)      for rows that draw from the job's seed
        = H(key)                                       for rows whose result their content alone decides

So an edited input finds the results of the rows that are still in it, and equal greedy rows are computed once.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
KEY_DTYPE = np.dtype(f"S{KEY_BYTES}")
MAX_RECENT = 1 << 16


def row_key(token_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> bytes:
    content = json.dumps(sampling_params, sort_keys=True).encode() if sampling_params else b""
    return hashed(array("i", token_ids).tobytes(), content)


def row_id(key: bytes, num_equal_before: int | None) -> bytes:
    return hashed(key) if num_equal_before is None else hashed(key, num_equal_before.to_bytes(8, "little"))


def hashed(*parts: bytes) -> bytes:
    """16 bytes of which the last is never 0, since numpy takes zeros at the end of a string for padding."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    value = digest.digest()
    return value[:-1] + bytes((value[-1] | 1,))


class EqualRows:
    """Numbers equal keys as they come: 0, 1, 2 ... Holds 20 bytes a distinct key, besides a few recent ones."""

    def __init__(self) -> None:
        self._keys: NDArray[np.bytes_] = np.empty(0, KEY_DTYPE)  # sorted
        self._counts: NDArray[np.int32] = np.empty(0, np.int32)
        self._recent: dict[bytes, int] = {}  # counts, those in the arrays included

    def number(self, key: bytes) -> int:
        number = self._recent.get(key)
        if number is None:
            position = int(np.searchsorted(self._keys, np.bytes_(key))) if len(self._keys) else 0
            is_known = position < len(self._keys) and self._keys[position] == key
            number = int(self._counts[position]) if is_known else 0
            if len(self._recent) >= MAX_RECENT:
                self._merge()
        self._recent[key] = number + 1
        return number

    def _merge(self) -> None:
        keys = np.concatenate([np.array(list(self._recent), KEY_DTYPE), self._keys])
        counts = np.concatenate([np.array(list(self._recent.values()), np.int32), self._counts])
        self._keys, first = np.unique(keys, return_index=True)  # the recent ones stand first
        self._counts = counts[first]
        self._recent.clear()
