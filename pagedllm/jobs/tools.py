"""What is done with the files of jobs without a model: merging the shards of one, telling how far one is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pagedllm.jobs.files import check_output, manifest_path, replaced
from pagedllm.jobs.journal import read_manifest
from pagedllm.jobs.result_form import ResultForm
from pagedllm.jobs.source import is_compressed, kind_of

FAILED = re.compile(rb'"finish_reason": (\[?"error"(, "error")*\]?), "stop_reason": (""|\[)')


def merge_shards(shards: Sequence[str], output: str) -> int:
    """Writes the rows of all shards into one new file, in the order of the whole input; returns how many.

    Plain rows bear their number; OpenAI lines have none, so that the manifest beside each shard is needed.
    Raises ValueError where a row is missing, stands twice or is no result row, OSError for files.
    """
    final = Path(os.path.realpath(output))
    check_output([final], output, list(shards))
    if final.exists():
        raise FileExistsError(errno.EEXIST, "the output exists", output)
    for path in (*shards, output):
        if kind_of(path) != "jsonl" or is_compressed(path):
            raise ValueError(f"{path!r}: merge joins JSON lines: `pagedllm export` turns others into them")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(shard, "rb")) for shard in shards]
        manifests = [read_manifest(manifest_path(shard)) for shard in shards]
        if any(manifest is not None and manifest["lines"] == "openai" for manifest in manifests):
            places = _openai_places(shards, files, manifests)
        else:
            places = _plain_places(shards, files, manifests)
        places.sort()
        for expected, (row, number, _) in enumerate(places):
            if row != expected:
                what = f"row {row} stands twice" if row < expected else f"row {expected} is missing"
                raise ValueError(f"{what}: pass every shard of the job once (found at {shards[number]})")
        with replaced(final) as stream:
            for _, number, offset in places:
                files[number].seek(offset)
                stream.write(files[number].readline())
    return len(places)


Place = tuple[int, int, int]  # row, shard, offset
Manifests = Sequence[Mapping[str, Any] | None]


def _plain_places(shards: Sequence[str], files: Sequence[BinaryIO], manifests: Manifests) -> list[Place]:
    places = []
    for number, (file, manifest) in enumerate(zip(files, manifests, strict=True)):
        form = ResultForm() if manifest is None else ResultForm.of_settings(manifest["form"])
        row_name, offset = form.names()["row"], 0
        for line in file:
            try:
                places.append((json.loads(line)[row_name], number, offset))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{shards[number]}: no result row at byte {offset:,}") from None
            offset += len(line)
    return places


def _openai_places(shards: Sequence[str], files: Sequence[BinaryIO], manifests: Manifests) -> list[Place]:
    """Line j of shard i of n is row j * n + i - 1."""
    places = []
    for number, (file, manifest) in enumerate(zip(files, manifests, strict=True)):
        if manifest is None or manifest["lines"] != "openai" or manifest["state"] != "finished":
            raise ValueError(f"{shards[number]}: no finished OpenAI batch has its manifest beside it")
        if manifest["order"] != "input":
            raise ValueError(f"{shards[number]}: its lines are in the order of completion: run it with --order input")
        (first, step), offset = manifest["job"]["shard"], 0
        for line_number, line in enumerate(file):
            places.append((line_number * step + first - 1, number, offset))
            offset += len(line)
    return places


def describe_job(output: str) -> str:
    """One line: finished, or how many results there are. Raises FileNotFoundError where there is no job."""
    final = Path(os.path.realpath(output))
    manifest = read_manifest(manifest_path(output))
    if manifest is None:
        raise FileNotFoundError(errno.ENOENT, "no job wrote this file", output)
    if manifest["state"] == "finished" and final.exists():
        return f"{output}: finished, {manifest['rows']:,} rows, {manifest['failed']:,} failed, {manifest['cut']:,} cut"
    partial = final.with_name(final.name + ".partial")
    num_lines = num_failed = 0
    if partial.exists():
        with open(partial, "rb") as stream:
            for line in stream:
                num_lines += line.endswith(b"\n")
                num_failed += FAILED.search(line) is not None
    total = f" of {manifest['rows']:,} rows" if manifest["rows"] is not None else ""
    return f"{output}: not finished, {num_lines:,} results{total}, {num_failed:,} of them failed"
