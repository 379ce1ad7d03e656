"""TokenStore: the token ids of a window's prompts, in memory while they are few, else in an unnamed file.

The file is read by place, not mapped: pages of a mapping that were touched count as the process's own memory.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 8 << 20
TOKEN_BYTES = 4


class TokenStore:
    """Prompts as bytes, by index, int32 a token. folder: where the file goes; None: the system's for such files."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._ends = array("q", (0,))
        self._tail = bytearray()  # what the file does not have yet
        self._file: IO[bytes] | None = None
        self._num_written = 0

    def append(self, token_ids: Sequence[int]) -> None:
        self._tail += array("i", token_ids).tobytes()
        self._ends.append(self._num_written + len(self._tail))
        if len(self._tail) >= MEMORY_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".pagedllm-", buffering=0)  # noqa: SIM115
            written = 0
            while written < len(self._tail):
                written += self._file.write(bytes(self._tail[written:]))
            self._num_written += len(self._tail)
            self._tail.clear()

    def token_ids(self, index: int) -> list[int]:
        return array("i", self[index]).tolist()

    def close(self) -> None:
        """Gives the file back. May be called again; nothing can be read after it."""
        if self._file is not None:
            self._file.close()

    def num_bytes(self) -> NDArray[np.int32]:
        """Of each prompt."""
        return np.diff(np.frombuffer(self._ends, np.int64)).astype(np.int32)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        begin, end = self._ends[index], self._ends[index + 1]
        if begin >= self._num_written:
            return bytes(self._tail[begin - self._num_written : end - self._num_written])
        assert self._file is not None
        return os.pread(self._file.fileno(), end - begin, begin)
