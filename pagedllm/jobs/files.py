"""The output of a job: what stands there already, every check before the model loads, and how OUT comes about.

    OUT.partial         the journal (journal.py): finished rows, as they finish
    OUT.manifest.json   what the job is: it tells whether another run may continue
    OUT                 made at the end from input and journal, in one go; an earlier OUT stays until then

A device, a pipe and "-" are written as they are (StreamFile); nothing can be continued there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pagedllm.jobs.formats import JobRefused
from pagedllm.jobs.journal import Journal, read_manifest, sync_folder, write_manifest
from pagedllm.jobs.openai import OpenAILines
from pagedllm.jobs.options import IfExists, Order
from pagedllm.jobs.planned import NO_PLACE, RowTable
from pagedllm.jobs.result_form import ResultForm
from pagedllm.jobs.source import Source, is_compressed, kind_of
from pagedllm.jobs.writers import ResultRow, write_results

CHUNK_ROWS = 4096


class JobFiles:
    """A regular OUT and its companions."""

    def __init__(self, output: str) -> None:
        self.final = Path(os.path.realpath(output))
        self.kind, self.is_compressed = kind_of(output), is_compressed(output)
        self.partial = self.final.with_name(self.final.name + ".partial")
        self.manifest_path = manifest_path(output)
        self._new = self.final.with_name(self.final.name + ".new")
        self.manifest: dict[str, Any] | None = None
        self._is_fresh = True
        self._journal: Journal | None = None
        self._output = output

    def read(self) -> dict[str, Any]:
        """The manifest of the job that is there. Raises FileNotFoundError where there is none."""
        self.manifest = read_manifest(self.manifest_path)
        if self.manifest is None:
            raise FileNotFoundError(errno.ENOENT, "no job wrote this file", self._output)
        return self.manifest

    def claim(self, inputs: list[str], if_exists: IfExists) -> None:
        """Raises as `check_output`, and FileExistsError for files of somebody else."""
        check_output([self.final, self.partial, self.manifest_path, self._new], self._output, inputs)
        self.manifest = None if if_exists == "overwrite" else read_manifest(self.manifest_path)
        self._is_fresh = self.manifest is None
        if if_exists == "overwrite":
            return
        is_ours = self.manifest is not None and if_exists == "resume"
        for path in (self.final, self.partial):
            if path.exists() and not is_ours and not (path is self.partial and path.stat().st_size == 0):
                text = "the output exists" if if_exists == "fail" else "this file is not of a job that can be continued"
                text += "; if_exists='overwrite' (--if-exists overwrite) replaces it"
                raise FileExistsError(errno.EEXIST, text, str(path))

    @property
    def is_finished(self) -> bool:
        return self.manifest is not None and self.manifest["state"] == "finished" and self.final.exists()

    def begin(self, job: Mapping[str, Any], *, may_grow: bool) -> Journal:
        """Opens the journal of this job. may_grow: max_tokens may be larger than before.

        Raises JobRefused where the files are of a job that differs, and FileExistsError where another run has them.
        """
        if self.manifest is None:
            self._journal = Journal(self.partial, is_new=True)
        else:
            _check_same(self.manifest["job"], job, may_grow)
            self._journal = Journal(self.partial, is_new=self.is_finished)
        return self._journal

    def peek(self, job: Mapping[str, Any], folder: Path, *, may_grow: bool) -> Journal:
        """The journal that `begin` would open, or where that would be empty one in `folder`. Raises as `begin`.

        The caller closes it; nothing must be appended to one of the job.
        """
        if self.manifest is not None:
            _check_same(self.manifest["job"], job, may_grow)
            if not self.is_finished:
                return Journal(self.partial)
        return Journal(folder / "journal", is_new=True)

    def note(self, job: Mapping[str, Any], state: str, **values: Any) -> None:
        self.manifest = {"state": state, "job": dict(job), **values}
        write_manifest(self.manifest_path, self.manifest)

    def commit(
        self, source: Source, table: RowTable, order: Order, form: ResultForm, openai: OpenAILines | None
    ) -> None:
        """Makes OUT: the rows of the table, each with the journal's columns. All of them must be in the journal."""
        assert self._journal is not None
        journal = self._journal
        journal.sync()
        journal.index()
        originals = source.paths if self.kind == source.kind == "parquet" else ()
        with replaced(self.final) as stream:
            write_results(
                stream,
                self.kind,
                self.is_compressed,
                lambda: _result_rows(source, table, journal, order),
                form,
                openai=openai,
                originals=originals,
            )

    def drop_journal(self) -> None:
        """OUT and the manifest say it all now."""
        self.partial.unlink(missing_ok=True)

    def close(self) -> None:
        """May be called again. A journal without a line goes, and with it the manifest that was made for it."""
        if self._journal is None:
            return
        if self._journal.num_lines == 0 and not (self.manifest and self.manifest["state"] == "finished"):
            self.partial.unlink(missing_ok=True)
            if self._is_fresh:
                self.manifest_path.unlink(missing_ok=True)
        self._journal.close()
        self._journal = None


def _result_rows(source: Source, table: RowTable, journal: Journal, order: Order) -> Iterator[list[ResultRow]]:
    ids = table.all_ids()
    positions = journal.positions(ids, order == "completion")
    for begin in range(0, len(ids), CHUNK_ROWS):
        chunk = positions[begin : begin + CHUNK_ROWS]
        rows = []
        for position, line in zip(chunk.tolist(), journal.find(ids[chunk]).tolist(), strict=True):
            assert line >= 0, f"row {table.rows[position]} has no result"
            place = table.places[position]
            raw = None if place == NO_PLACE else source.line_at(place).decode()
            columns = journal.columns_at(line).decode()
            rows.append(ResultRow(table.rows[position], bytes(ids[position]), raw, columns))
        yield rows


@contextlib.contextmanager
def replaced(final: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the file's place at the end of the block; nothing of it stays after an exception."""
    new = final.with_name(final.name + ".new")
    try:
        with open(new, "wb", buffering=1 << 20) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, final)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], may_grow: bool) -> None:
    for name in new:
        before, now = old.get(name), new[name]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            for key in sorted({*before, *now}):
                is_growth = key == "max_tokens" and may_grow and _is_larger(now.get(key, 0), before.get(key, 0))
                if before.get(key) != now.get(key) and not is_growth:
                    hint = "; it may grow with --retry cut" if key == "max_tokens" else ""
                    _refuse(key, before.get(key, "unset"), now.get(key, "unset"), hint)
            continue
        _refuse(name, before, now, "")


def _refuse(name: str, before: object, now: object, hint: str) -> None:
    raise JobRefused(
        f"the job there was run with another {name}: {before!r} -> {now!r}{hint}; "
        "if_exists='overwrite' (--if-exists overwrite) starts anew"
    )


def _is_larger(now: int | None, before: int | None) -> bool:
    return now is None or (before is not None and now > before)


class StreamFile:
    """A device, a pipe or stdout: whole lines, at once."""

    def __init__(self, output: str) -> None:
        self.num_lines = 0
        self._is_owner = output != "-"
        if self._is_owner:
            self._fd = os.open(output, os.O_WRONLY)
        else:
            sys.stdout.flush()
            self._fd = sys.stdout.fileno()

    def write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]
        self.num_lines += 1

    def close(self) -> None:
        """May be called again."""
        if self._is_owner:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._is_owner = False


def manifest_path(output: str) -> Path:
    """Of the job that writes this file."""
    return Path(os.path.realpath(output) + ".manifest.json")


def is_stream(output: str) -> bool:
    return output == "-" or (os.path.exists(output) and not os.path.isfile(output) and not os.path.isdir(output))


def check_output(paths: list[Path], output: str, inputs: list[str]) -> None:
    """paths: all that may be written, the output's own with its links resolved first.

    Raises FileNotFoundError, IsADirectoryError, PermissionError, and ValueError where an output is an input, by
    whatever names.
    """
    final = paths[0]
    if not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the output's folder does not exist", str(final.parent))
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, "the output is a folder", output)
    for path in paths:
        for input in inputs:
            if input != "-" and path.exists() and path.samefile(input):
                raise ValueError(f"input {input!r} and output {str(path)!r} are the same file")
    if not os.access(final.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the output's folder cannot be written to", str(final.parent))
