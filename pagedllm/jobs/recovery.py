"""A finished OUT -> a journal again, so that an edited input costs its new rows only.

The names of plain rows are made anew from what stands in OUT. Where OUT does not hold the whole rows, the manifest has
the names: `ids`, 16 bytes a row in base64. OpenAI lines bear their names. `cut` in the manifest holds the tokens of
rows that a length ended, for --retry cut, as far as MAX_CUT_BYTES reach; the others start anew, with the same result.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pagedllm.jobs.files import JobFiles
from pagedllm.jobs.formats import PlainRows
from pagedllm.jobs.journal import CUT, Journal
from pagedllm.jobs.keys import KEY_BYTES
from pagedllm.jobs.openai import OpenAILines
from pagedllm.jobs.options import Order
from pagedllm.jobs.planned import RowTable
from pagedllm.jobs.prompting import PromptForm
from pagedllm.jobs.result_form import ResultForm
from pagedllm.jobs.rows import RowReader
from pagedllm.jobs.score_rows import LOGLIKELIHOOD
from pagedllm.jobs.source import Line, Source

CHUNK_ROWS = 1024
MAX_CUT_BYTES = 16 << 20
T = TypeVar("T")


class Result(NamedTuple):
    row: int
    values: dict[str, Any]  # of the result, by its columns' own names
    rest: dict[str, Any]  # the input's fields


def facts_for_recovery(
    files: JobFiles, journal: Journal, table: RowTable, order: Order, form: ResultForm, openai: OpenAILines | None
) -> dict[str, Any]:
    """What the manifest of a finished job must hold, beside OUT."""
    facts: dict[str, Any] = {}
    ids = table.all_ids()
    if openai is None and not _names_itself(files, form):
        in_order = ids[journal.positions(ids, order == "completion")]
        facts["ids"] = base64.b64encode(in_order.tobytes()).decode()
    cut = array("i")
    for begin in range(0, len(table.rows), CHUNK_ROWS):
        lines = journal.find(ids[begin : begin + CHUNK_ROWS])
        for index in (journal.endings(lines) == CUT).nonzero()[0].tolist():
            state = journal.cut_at(int(lines[index]))
            if state and len(cut) < MAX_CUT_BYTES // cut.itemsize:
                cut.extend((table.rows[begin + index], len(state), *state))
    if cut:
        facts["cut_states"] = base64.b64encode(zlib.compress(cut.tobytes(), 1)).decode()
    return facts


def recover(
    files: JobFiles, journal: Journal, reader: RowReader, prompts: PromptForm, openai: OpenAILines | None
) -> None:
    """Fills the journal of this job from OUT. reader: of this job; its parameters name the rows."""
    manifest = files.manifest
    assert manifest is not None
    if openai is not None:
        with contextlib.closing(Source(str(files.final), kind="jsonl")) as source:
            for lines in chunked(source.lines(), CHUNK_ROWS):
                journal.append([openai.recovered(line.text or b"", line.row) for line in lines])
        return
    form = ResultForm.of_settings(manifest["form"])
    cut = _CutStates(manifest.get("cut_states", ""))
    ids = base64.b64decode(manifest.get("ids", ""))
    naming = reader.renamed(PlainRows(prompts, (), is_scored=form.task == LOGLIKELIHOOD).parse)
    results = read_results(files, form) if ids else _sorted_results(files, form)
    number = 0
    for chunk in chunked(results, CHUNK_ROWS):
        if ids:
            names = [ids[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in range(number, number + len(chunk))]
        else:
            lines = [Line(result.row, 0, json.dumps(result.rest).encode()) for result in chunk]
            names = [b"" if row.params is None else row.id for row in naming.prepare(lines)]
        number += len(chunk)
        journal.append(
            [
                (name, result.row, {**cut.columns(result.row), **result.values})
                for name, result in zip(names, chunk, strict=True)
                if name
            ]
        )


def _names_itself(files: JobFiles, form: ResultForm) -> bool:
    """Whether OUT holds all that its rows' names are made of, in places that can be gone back to."""
    return files.kind == "jsonl" and not files.is_compressed and form.keep is None


def read_results(files: JobFiles, form: ResultForm) -> Iterator[Result]:
    """Of a finished OUT, in its order. form: that it was written by."""
    with contextlib.closing(Source(str(files.final), kind=files.kind)) as source:
        for line in source.lines():
            yield _result(line.text or b"", form, is_text=files.kind in ("csv", "tsv"))


def _sorted_results(files: JobFiles, form: ResultForm) -> Iterator[Result]:
    """By their rows, in which order equal rows were numbered."""
    row_name = form.names()["row"]
    rows, places = array("q"), array("q")
    with contextlib.closing(Source(str(files.final), kind=files.kind)) as source:
        for line in source.lines():
            rows.append(json.loads(line.text or b"")[row_name])
            places.append(line.place)
        for index in np.argsort(rows, kind="stable").tolist():
            yield _result(source.line_at(places[index]), form, is_text=False)


def _result(text: bytes, form: ResultForm, *, is_text: bool) -> Result:
    """is_text: a record's values are all text, with lists as JSON."""
    values = json.loads(text)
    types, found = form.types(), {}
    for column, name in form.names().items():
        value = values.pop(name)
        if is_text and types[name] != "string":
            value = json.loads(value) if value else None
        found[column] = value
    if is_text and found["error"]:
        found["output"] = None if form.n == 1 else [None] * form.n
    return Result(found.pop("row"), found, values)


class _CutStates:
    """States of rows that a length ended, by row. text: the manifest's."""

    def __init__(self, text: str) -> None:
        values = zlib.decompress(base64.b64decode(text)) if text else b""
        self._values = np.frombuffer(values, np.int32)  # row, length, state ...; rows ascend
        begins, position = array("q"), 0
        while position < len(self._values):
            begins.append(position)
            position += 2 + int(self._values[position + 1])
        self._begins = np.frombuffer(begins, np.int64)
        self._rows = self._values[self._begins]

    def columns(self, row: int) -> dict[str, Any]:
        """`cut` for the journal, where there is a state."""
        index = int(np.searchsorted(self._rows, row))
        if index == len(self._rows) or self._rows[index] != row:
            return {}
        begin = int(self._begins[index]) + 2
        return {"cut": self._values[begin : begin + int(self._values[begin - 1])].tolist()}


def chunked(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
