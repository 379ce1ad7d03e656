"""What is done with the files of jobs without a model: merging the shards of one, telling how far one is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from pagedllm.jobs.files import check_output
from pagedllm.jobs.journal import read_manifest


def merge_shards(shards: Sequence[str], output: str) -> int:
    """Writes the rows of all shards into one new file, by their `row`; returns how many.

    Raises ValueError where a row is missing, stands twice or is no result row, OSError for files.
    """
    final = Path(os.path.realpath(output))
    check_output([final], output, list(shards))
    if final.exists():
        raise FileExistsError(errno.EEXIST, "the output exists", output)
    places: list[tuple[int, int, int]] = []  # row, shard, offset
    new = final.with_name(final.name + ".new")
    files = [open(shard, "rb") for shard in shards]  # noqa: SIM115
    try:
        for number, file in enumerate(files):
            offset = 0
            for line in file:
                try:
                    places.append((json.loads(line)["row"], number, offset))
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{shards[number]}: no result row at byte {offset:,}") from None
                offset += len(line)
        places.sort()
        for expected, (row, number, _) in enumerate(places):
            if row != expected:
                what = f"row {row} stands twice" if row < expected else f"row {expected} is missing"
                raise ValueError(f"{what}: pass every shard of the job once (found at {shards[number]})")
        with open(new, "wb", buffering=1 << 20) as stream:
            for _, number, offset in places:
                files[number].seek(offset)
                stream.write(files[number].readline())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, final)
    finally:
        new.unlink(missing_ok=True)
        for file in files:
            file.close()
    return len(places)


def describe_job(output: str) -> str:
    """One line: finished, or how many results there are. Raises FileNotFoundError where there is no job."""
    final = Path(os.path.realpath(output))
    manifest = read_manifest(final.with_name(final.name + ".manifest.json"))
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
                num_failed += b'"finish_reason": "error", "stop_reason": ""' in line
    return f"{output}: not finished, {num_lines:,} results, {num_failed:,} of them failed"
