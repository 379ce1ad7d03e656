"""The input of a job: its lines in order, and each of them again by its place.

A path, "-" (stdin), a FIFO, a .gz file, or a pattern of several files, which are read in the order of their names. The
name tells what is in it: .parquet, .csv and .tsv are tables, whose rows become JSON objects here; anything else is JSON
lines. What has no places to go back to is kept in an unnamed temporary file, where the job needs it twice.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import gzip
import os
import sys
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from pagedllm.jobs import parquet
from pagedllm.jobs.csv_records import DELIMITERS, read_records
from pagedllm.jobs.formats import BYTE_ORDER_MARK, read_lines

BEGINNINGS = {  # of files that hold no lines of text, whatever their names say
    b"\x1f\x8b": "gzip: name it .gz",
    b"PAR1": "Parquet: name it .parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet: export JSON lines or CSV",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it",
    b"BZh": "bzip2: unpack it",
    b"\xfd7zXZ": "xz: unpack it",
}


class Line(NamedTuple):
    row: int  # 0-based in the whole input, also where only a part of it is run
    place: int  # for `line_at`
    text: bytes | None  # without its end; None: too long to be read, or no record of its table
    fault: str = ""  # why it is no record


class Source:
    """kind: what is in it, where the name does not tell; limit: only so many rows; shard (i, n): of those, every n-th
    from the i-th on, counted from 1. What is stored in spool_folder goes with this object.

    Raises FileNotFoundError, IsADirectoryError or PermissionError at once, ValueError for files of several kinds and
    for one that begins as no text does.
    """

    def __init__(
        self,
        input: str,
        *,
        kind: str | None = None,
        limit: int | None = None,
        shard: tuple[int, int] = (1, 1),
        spool_folder: Path | None = None,
    ) -> None:
        self.input = input if input == "-" else os.path.abspath(input)
        self.paths = find_inputs(input)
        self.kind = kind or kind_of(self.paths[0])
        for path in self.paths:
            if kind is None and kind_of(path) != self.kind:
                raise ValueError(f"{self.paths[0]!r} and {path!r} are of different kinds: pass files of one kind")
            if self.kind != "parquet" and not is_compressed(path) and os.path.isfile(path):
                _refuse_other_content(path)
        self._limit = limit
        self._shard = shard
        self._exit = contextlib.ExitStack()
        self._first = None if input == "-" else self._exit.enter_context(open(self.paths[0], "rb"))  # noqa: SIM115
        self._bases: list[int] = []  # place of the first byte of each file read so far
        self._open: tuple[int, BinaryIO] | None = None  # number of the file that `line_at` has open
        self._spool: BinaryIO | None = None
        has_places = self.can_be_read_twice and self.kind == "jsonl" and not any(map(is_compressed, self.paths))
        if spool_folder is not None and not has_places:
            spool = tempfile.TemporaryFile(dir=spool_folder, prefix=".pagedllm-")  # noqa: SIM115
            self._spool = cast("BinaryIO", self._exit.enter_context(spool))
        self._digest = blake2b(digest_size=16)

    @property
    def can_be_read_twice(self) -> bool:
        return all(path != "-" and os.path.isfile(path) for path in self.paths)

    @property
    def digest(self) -> str:
        """A hash of the rows read so far."""
        return self._digest.hexdigest()

    def lines(self) -> Iterator[Line]:
        """May be called once. Raises OSError where a compressed file is damaged, TableError where a table is."""
        index, base = 0, 0
        for number, path in enumerate(self.paths):
            self._bases.append(base)
            for offset, text, fault in self._read(number, path):
                if self._limit is not None and index >= self._limit:
                    return
                if index % self._shard[1] == self._shard[0] - 1:
                    self._digest.update(b"%d:" % (-1 if text is None else len(text)) + (text or b""))
                    yield Line(index, self._keep(text, base + offset), text, fault)
                index += 1
            base += os.stat(path).st_size if path != "-" else 0

    def line_at(self, place: int) -> bytes:
        """The text of a line again."""
        if self._spool is not None:
            self._spool.flush()
            self._spool.seek(place)
            return self._spool.readline()[:-1]
        number = bisect_right(self._bases, place) - 1
        if self._open is None or self._open[0] != number:
            if self._open is not None:
                self._open[1].close()
            self._open = number, open(self.paths[number], "rb")  # noqa: SIM115
        offset = place - self._bases[number]
        self._open[1].seek(offset)
        line = self._open[1].readline()
        return (line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line).strip()

    def count(self) -> int | None:
        """How many rows will come; None where that takes a reading that cannot be repeated."""
        if not self.can_be_read_twice:
            return None
        num_rows = 0
        for number, path in enumerate(self.paths):
            if self.kind == "parquet":
                num_rows += parquet.count_rows(path)
            else:
                num_rows += sum(1 for _ in self._read(number, path))
        if self._limit is not None:
            num_rows = min(num_rows, self._limit)
        first, step = self._shard
        return len(range(first - 1, num_rows, step))

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
        self._exit.close()

    def _read(self, number: int, path: str) -> Iterator[tuple[int, bytes | None, str]]:
        """(offset, text, fault) of each row; offsets mean something in JSON lines only."""
        if self.kind == "parquet":
            for text in parquet.read_rows(path):
                yield 0, text, ""
            return
        with self._open_stream(number, path) as stream:
            if self.kind == "jsonl":
                for offset, line in read_lines(stream):
                    yield offset, line, ""
                return
            for record, fault in read_records(stream, DELIMITERS[self.kind]):
                yield 0, record, fault

    def _keep(self, text: bytes | None, place: int) -> int:
        if self._spool is None:
            return place
        place = self._spool.tell() if text is None else self._spool.seek(0, os.SEEK_END)
        if text is not None:
            self._spool.write(text + b"\n")
        return place

    @contextlib.contextmanager
    def _open_stream(self, number: int, path: str) -> Iterator[BinaryIO]:
        if path == "-":
            yield sys.stdin.buffer
            return
        first, self._first = self._first if number == 0 else None, None
        with first or open(path, "rb") as stream:
            if not is_compressed(path):
                yield stream
                return
            try:
                with gzip.open(stream) as unpacked:
                    yield cast("BinaryIO", unpacked)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise OSError(errno.EIO, f"the compressed input is damaged: {error}", path) from None


def _refuse_other_content(path: str) -> None:
    with open(path, "rb") as stream:
        beginning = stream.read(max(map(len, BEGINNINGS)))
    for magic, what in BEGINNINGS.items():
        if beginning.startswith(magic):
            raise ValueError(f"{path!r} is {what}")


def is_compressed(path: str) -> bool:
    return path.lower().endswith(".gz")


def kind_of(path: str) -> str:
    """ "parquet", "csv", "tsv" or "jsonl", by the name."""
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    return suffix[1:] if suffix in (".parquet", ".csv", ".tsv") else "jsonl"


def find_inputs(input: str) -> list[str]:
    """The files of an input, a pattern's in the order of their names."""
    if input == "-" or os.path.lexists(input) or not glob.has_magic(input):
        paths = [input]
    else:
        paths = sorted(glob.glob(input, recursive=True))
        if not paths:
            raise FileNotFoundError(errno.ENOENT, "no file has a name like that", input)
    for path in paths:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "the input is a folder", path)
    return paths
