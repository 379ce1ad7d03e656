"""OUT.partial and OUT.manifest.json: what a job has done, and what it is.

The journal is append only, one whole line for each finished row, in the order they finish:

    {"id": "32 hex digits", "row": 7, "output": "...", ..., "error": ""}

`id` is the row's (keys.py); from `output` on, the columns follow by their own names (result_form.py). Before it may
stand `cut`: what a row that a length ended goes on from. A process that is killed
loses nothing that was written, a machine that stops a second at most. A torn last line is cut off on opening.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedllm.jobs.formats import COLUMNS_HEAD, columns_text
from pagedllm.jobs.keys import KEY_BYTES, KEY_DTYPE

SYNC_SECONDS = 1.0
SYNC_LINES = 10_000
FIND_IDS = 4096
UNKNOWN_TOKENS = -1  # of the longest of several outputs
ENDED, CUT, ERROR = 0, 1, 2  # how a row came out
FORMAT = 2
LINE_HEAD = re.compile(rb'\{"id": "([0-9a-f]{32})", "row": (\d+), ')
CUT_STATE = re.compile(rb'\{"id": "[0-9a-f]{32}", "row": \d+, "cut": \[([0-9, ]+)\]')


class Journal:
    """is_new: what the file holds is dropped. Raises FileExistsError where another run has it open."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self.num_lines = 0
        self.num_damaged = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise FileExistsError(errno.EEXIST, "another run is writing this file", str(path)) from None
        if is_new:
            os.ftruncate(self._fd, 0)
        self._ids = bytearray()
        self._offsets, self._rows = array("q"), array("q")
        self._num_tokens, self._endings = array("i"), array("b")
        self._size = 0
        self._synced = time.monotonic()
        self._num_unsynced = 0
        self._load()
        self.index()

    def index(self) -> None:
        """Makes `find` see the lines that were appended since."""
        ids = np.frombuffer(bytes(self._ids), KEY_DTYPE)
        self._order = np.argsort(ids, kind="stable")
        self._sorted_ids = ids[self._order]

    def find(self, ids: Sequence[bytes] | NDArray[np.bytes_]) -> NDArray[np.int64]:
        """The number of the latest line of each id, -1 where there is none."""
        wanted = np.asarray(ids, KEY_DTYPE)
        positions = np.searchsorted(self._sorted_ids, wanted, side="right") - 1
        if not len(self._sorted_ids):
            return positions
        is_there = (positions >= 0) & (self._sorted_ids[positions] == wanted)
        return np.where(is_there, self._order[positions], -1)

    def num_tokens(self, lines: NDArray[np.int64]) -> NDArray[np.int32]:
        """Output tokens of these lines."""
        return np.frombuffer(self._num_tokens, np.int32)[lines]

    def endings(self, lines: NDArray[np.int64]) -> NDArray[np.int8]:
        """ENDED, CUT or ERROR of each."""
        return np.frombuffer(self._endings, np.int8)[lines]

    def rows(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows they were of when they were written."""
        return np.frombuffer(self._rows, np.int64)[lines]

    def results(self) -> NDArray[np.void]:
        """[num_lines] with `id` and `row` of each line."""
        found = np.empty(self.num_lines, [("id", KEY_DTYPE), ("row", np.int64)])
        found["id"] = np.frombuffer(bytes(self._ids), KEY_DTYPE)
        found["row"] = self._rows
        return found

    def positions(self, ids: NDArray[np.bytes_], is_by_completion: bool) -> NDArray[np.int64]:
        """The order of OUT: places among these ids of the first, second ... result."""
        if not is_by_completion or not len(ids):
            return np.arange(len(ids))
        lines = [self.find(ids[begin : begin + FIND_IDS]) for begin in range(0, len(ids), FIND_IDS)]
        return np.argsort(np.concatenate(lines), kind="stable")

    def append(self, entries: Sequence[tuple[bytes, int, Mapping[str, Any]]]) -> None:
        """(id, row, columns) each; on disk when this returns, as far as the system keeps its word.

        `cut` comes first among the columns, where it is one.
        """
        lines = [
            f'{{"id": "{row_id.hex()}", "row": {row}, {columns_text(columns)}}}\n'.encode()
            for row_id, row, columns in entries
        ]
        view = memoryview(b"".join(lines))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BaseException:
            os.ftruncate(self._fd, self._size)  # a disk that is full may hold the first part of a line
            raise
        for (row_id, row, columns), line in zip(entries, lines, strict=True):
            self._note(row_id, row, columns, len(line))
        self._num_unsynced += len(lines)
        if self._num_unsynced >= SYNC_LINES or time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def columns_at(self, line: int) -> bytes:
        """The columns' text of a line, without braces."""
        text = self._line_at(line)
        return text[text.index(COLUMNS_HEAD) : -2]

    def cut_at(self, line: int) -> list[int] | None:
        """What stands there to go on from."""
        match = CUT_STATE.match(self._line_at(line))
        return None if match is None else [int(value) for value in match[1].split(b",")]

    def _line_at(self, line: int) -> bytes:
        """With its end. Another line may have been damaged behind it."""
        end = self._offsets[line + 1] if line + 1 < len(self._offsets) else self._size
        text = os.pread(self._fd, end - self._offsets[line], self._offsets[line])
        return text[: text.index(b"\n") + 1]

    def sync(self) -> None:
        os.fsync(self._fd)
        self._synced, self._num_unsynced = time.monotonic(), 0

    def close(self) -> None:
        """May be called again; gives the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self) -> None:
        with open(self.path, "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    os.ftruncate(self._fd, self._size)  # torn
                    break
                try:
                    values = json.loads(line)
                    row_id = bytes.fromhex(values["id"])
                    if len(row_id) != KEY_BYTES or COLUMNS_HEAD not in line:
                        raise ValueError
                    self._note(row_id, values["row"], values, len(line))
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    self.num_damaged += 1  # blocks that never reached the disk read as zeros
                    self._size += len(line)

    def _note(self, row_id: bytes, row: int, columns: Mapping[str, Any], size: int) -> None:
        reason, num_tokens = columns["finish_reason"], columns["completion_tokens"]
        if isinstance(reason, list):  # of several outputs: a length that ends one is the same for all
            reason = next((one for one in ("error", "length") if one in reason), "stop")
            num_tokens = max(num_tokens)
        self._rows.append(row)
        self._num_tokens.append(num_tokens)
        self._ids += row_id
        self._offsets.append(self._size)
        self._endings.append(ERROR if reason == "error" else CUT if reason == "length" else ENDED)
        self._size += size
        self.num_lines += 1


def read_offsets(path: Path) -> dict[int, int]:
    """Row -> where its latest line begins. Reads only, also while a run is writing."""
    offsets: dict[int, int] = {}
    offset = 0
    with open(path, "rb") as stream:
        for line in stream:
            match = LINE_HEAD.match(line)
            if match is not None and line.endswith(b"\n"):
                offsets[int(match[2])] = offset
            offset += len(line)
    return offsets


def split_line(line: bytes) -> tuple[bytes, str]:
    """The id, and the columns' text without braces."""
    match = LINE_HEAD.match(line)
    assert match is not None
    return bytes.fromhex(match[1].decode()), line[line.index(COLUMNS_HEAD) : line.rindex(b"}")].decode()


def read_manifest(path: Path) -> dict[str, Any] | None:
    """None where there is none. Raises ValueError for a file that is no manifest of ours."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not the manifest of a job: {error}; if_exists='overwrite' starts anew") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path}: not a manifest that this version of pagedllm reads")
    return values


def write_manifest(path: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, **values}, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes names that were given or taken in a folder last."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
