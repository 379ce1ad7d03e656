"""The results that there are now, of a job that runs, was stopped or is finished, in the kind of another file's name.

Reads only: a run that is writing is not disturbed. Of a job that is not finished, rows equal to one that is done are
not there yet, and where the input changed since, the result's columns stand alone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagedllm.jobs.files import JobFiles, check_output, replaced
from pagedllm.jobs.formats import LineError, columns_text, parse_object
from pagedllm.jobs.journal import read_offsets, split_line
from pagedllm.jobs.openai import OpenAILines
from pagedllm.jobs.recovery import chunked, read_results
from pagedllm.jobs.result_form import ResultForm
from pagedllm.jobs.source import Line, Source, is_compressed, kind_of
from pagedllm.jobs.writers import Chunks, ResultRow, write_results
from pagedllm.notices import LOGGER

CHUNK_ROWS = 4096


def export_results(output: str, target: str, *, overwrite: bool = False) -> int:
    """Writes the results of the job of `output` into `target`; returns how many. Raises OSError, ValueError."""
    final = Path(os.path.realpath(target))
    check_output([final], target, [output] if os.path.exists(output) else [])
    if final.exists() and not overwrite:
        raise FileExistsError(errno.EEXIST, "the file exists; --overwrite replaces it", target)
    files = JobFiles(output)
    manifest, kind = files.read(), kind_of(target)
    is_openai = manifest["lines"] == "openai"
    if is_openai and kind != "jsonl":
        raise ValueError(f"{target!r}: the results of OpenAI batch lines are JSON lines: name it .jsonl or .jsonl.gz")
    with replaced(final) as stream:
        if files.is_finished and (files.kind, files.is_compressed) == (kind, is_compressed(target)):
            with open(files.final, "rb") as finished:
                shutil.copyfileobj(finished, stream)
            return int(manifest["rows"])
        if files.is_finished and is_openai:
            raise ValueError(f"{output!r} has the results already: compress or unpack it with gzip")
        num_rows, chunks, originals = _finished(files) if files.is_finished else _unfinished(files, is_openai)
        form = ResultForm.of_settings(manifest["form"])
        openai = OpenAILines() if is_openai else None
        if openai is not None:
            openai.created = manifest["created"]
        write_results(stream, kind, is_compressed(target), chunks, form, openai=openai, originals=originals)
        return num_rows


def _finished(files: JobFiles) -> tuple[int, Chunks, list[str]]:
    assert files.manifest is not None
    form = ResultForm.of_settings(files.manifest["form"])

    def rows() -> Iterator[ResultRow]:
        for result in read_results(files, form):
            yield ResultRow(result.row, b"", json.dumps(result.rest), columns_text(result.values))

    return files.manifest["rows"], lambda: chunked(rows(), CHUNK_ROWS), []


def _unfinished(files: JobFiles, is_openai: bool) -> tuple[int, Chunks, list[str]]:
    assert files.manifest is not None
    manifest = files.manifest
    if manifest["is_mixed"]:
        raise ValueError("the input was edited since the job began: which row a result is of is known at its end only")
    entries = sorted(read_offsets(files.partial).items())
    paths = _unchanged_input(manifest)
    if paths is None:
        if is_openai:
            raise ValueError("the input is not there as it was, and the answers need their requests")
        LOGGER.warning("the input is not there as it was: the results stand without its columns")

    def rows() -> Iterator[ResultRow]:
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(open(files.partial, "rb"))
            lines = None if paths is None else stack.enter_context(contextlib.closing(_source(manifest))).lines()
            for row, offset in entries:
                journal.seek(offset)
                name, columns = split_line(journal.readline())
                raw = None if lines is None else _object(next(line for line in lines if line.row == row))
                yield ResultRow(row, name, raw, columns)

    is_parquet = paths is not None and kind_of(paths[0]) == "parquet"
    return len(entries), lambda: chunked(rows(), CHUNK_ROWS), paths if paths is not None and is_parquet else []


def _source(manifest: Mapping[str, Any]) -> Source:
    return Source(manifest["input_path"], limit=manifest["limit"], shard=tuple(manifest["job"]["shard"]))


def _unchanged_input(manifest: Mapping[str, Any]) -> list[str] | None:
    """Its files; None where the rows that the job has read are not there any more."""
    try:
        with contextlib.closing(_source(manifest)) as source:
            if not source.can_be_read_twice:
                return None
            for _ in itertools.islice(source.lines(), manifest["rows"]):
                pass
            return source.paths if source.digest == manifest["input"] else None
    except (OSError, ValueError):
        return None


def _object(line: Line) -> str | None:
    try:
        parse_object(line.text, line.fault)
    except LineError:
        return None
    return (line.text or b"").decode()
