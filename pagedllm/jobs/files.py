"""The files of a job: every check before the model loads, whole lines only while it runs.

Results go to OUT.partial, which takes OUT's name when the job is finished, so an earlier OUT stays until then. A
device, a pipe and "-" (stdin, stdout) are read and written as they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from pagedllm.errors import NotSupportedError

IfExists = Literal["resume", "overwrite", "fail"]
SYNC_SECONDS = 1.0


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "the input is a folder", path)
    with open(path, "rb") as stream:
        yield stream


class ResultFile:
    """Where result lines go. `write` puts one whole line out; `commit` finishes the file; `close` leaves it as it is.

    Raises, before anything is written: FileNotFoundError, IsADirectoryError, FileExistsError, PermissionError, and
    ValueError where output and input are one file, by whatever names.
    """

    def __init__(self, output: str, input: str, if_exists: IfExists | None = None) -> None:
        if if_exists not in (None, "resume", "overwrite", "fail"):
            raise ValueError(f"if_exists must be 'resume', 'overwrite' or 'fail', got {if_exists!r}")
        if if_exists == "resume":
            raise NotSupportedError("if_exists='resume' is not supported yet: pass 'overwrite', or another output")
        self.num_lines = 0
        self._size = 0
        self._synced = time.monotonic()
        self._partial: Path | None = None
        self._is_owner = True
        if output == "-":
            sys.stdout.flush()
            self._fd, self._is_owner = sys.stdout.fileno(), False
            return
        if os.path.exists(output) and not os.path.isfile(output) and not os.path.isdir(output):
            self._fd = os.open(output, os.O_WRONLY)
            return
        self._final = Path(os.path.realpath(output))
        check_output(self._final, output, input, overwrite=if_exists == "overwrite")
        self._partial = self._final.with_name(self._final.name + ".partial")
        mode = os.O_TRUNC if if_exists == "overwrite" else os.O_EXCL
        try:
            self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | mode, 0o666)
        except FileExistsError:
            text = (
                "an earlier run left its first results here; if_exists='overwrite' (--if-exists overwrite) drops them"
            )
            raise FileExistsError(errno.EEXIST, text, str(self._partial)) from None

    @property
    def partial(self) -> Path | None:
        """The file that holds the lines until `commit`; None for a device, a pipe or stdout."""
        return self._partial

    def write(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._drop_torn_line()
            raise
        self._size += len(line)
        self.num_lines += 1
        if self._partial is not None and time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def commit(self) -> None:
        """Syncs the lines to disk and gives the file its name."""
        if self._partial is None:
            return
        os.fsync(self._fd)
        os.replace(self._partial, self._final)
        self._partial = None
        folder = os.open(self._final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """May be called again. What is written stays in `partial`; an empty partial file is removed."""
        if self._is_owner:
            os.close(self._fd)
            self._is_owner = False
            if self._partial is not None and self.num_lines == 0:
                self._partial.unlink()
                self._partial = None

    def _drop_torn_line(self) -> None:
        """After a failed write: a disk that is full may hold the first part of a line."""
        if self._partial is not None:
            os.ftruncate(self._fd, self._size)


def check_output(final: Path, output: str, input: str, *, overwrite: bool) -> None:
    """Raises as ResultFile does; final: `output` with its links resolved."""
    if not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the output's folder does not exist", str(final.parent))
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, "the output is a folder", output)
    for path in (final, final.with_name(final.name + ".partial")):
        if input != "-" and path.exists() and path.samefile(input):
            raise ValueError(f"input {input!r} and output {str(path)!r} are the same file")
    if final.exists() and not overwrite:
        text = "the output exists; if_exists='overwrite' (--if-exists overwrite) replaces it"
        raise FileExistsError(errno.EEXIST, text, output)
