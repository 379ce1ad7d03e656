"""Result rows -> a file of the kind that its name asks for: JSON lines, plain or .gz, .csv, .tsv or .parquet.

Called once a job is finished, with rows that can be gone through again: a table's columns are known after the first
time. The same rows give the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from pagedllm.jobs import parquet
from pagedllm.jobs.csv_records import DELIMITERS, record
from pagedllm.jobs.openai import OpenAILines
from pagedllm.jobs.result_form import ResultForm
from pagedllm.notices import LOGGER


class ResultRow(NamedTuple):
    row: int  # of the input
    id: bytes
    raw: str | None  # the input's object; None where it could not be read
    columns: str  # of the result, as JSON without braces, by their own names


HALF_SURROGATE = r"\ud"  # perhaps: of a pair too
Chunks = Callable[[], Iterator[Sequence[ResultRow]]]


def write_results(
    stream: BinaryIO,
    kind: str,
    is_compressed: bool,
    chunks: Chunks,
    form: ResultForm,
    *,
    openai: OpenAILines | None = None,
    originals: Sequence[str] = (),
) -> None:
    """kind: of `kind_of`; openai: the form of the results, where they are no plain rows; originals: the Parquet files
    that the rows' numbers are of, whose columns keep their types in Parquet."""
    with contextlib.ExitStack() as stack:
        if is_compressed:
            packed = gzip.GzipFile("", "wb", 6, stream, mtime=0)  # neither name nor time: equal rows, equal bytes
            stream = cast("BinaryIO", stack.enter_context(packed))
        if kind == "parquet":
            _write_parquet(stream, chunks, form, originals)
        elif kind in DELIMITERS:
            _write_records(stream, chunks, form, DELIMITERS[kind])
        else:
            for chunk in chunks():
                for row in chunk:
                    if openai is None:
                        stream.write(form.line(row.raw, row.columns, row.row))
                    else:
                        stream.write(openai.render(row.raw, json.loads(f"{{{row.columns}}}"), row.id.hex()))


def _write_records(stream: BinaryIO, chunks: Chunks, form: ResultForm, delimiter: str) -> None:
    names = list(dict.fromkeys(name for chunk in chunks() for row in chunk for name in _kept(row, form)))
    header = [*names, *form.names().values()]
    stream.write(record(header, delimiter).encode())
    for chunk in chunks():
        for row in chunk:
            values = {**_kept(row, form), **_results(row, form)}
            stream.write(record([_cell(values.get(name)) for name in header], delimiter).encode())


def _cell(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)


def _write_parquet(stream: BinaryIO, chunks: Chunks, form: ResultForm, originals: Sequence[str]) -> None:
    pyarrow = parquet.need_pyarrow("")
    rows = parquet.OriginalRows(originals) if originals else None
    mixed: list[str] = []
    if rows is not None:
        kept = [field for field in rows.schema if form.keep is None or field.name in form.keep]
        inputs = pyarrow.schema(kept)
    else:
        inputs, mixed = parquet.infer_schema([_kept(row, form) for row in chunk] for chunk in chunks())
    if mixed:
        LOGGER.warning("columns whose values are of several types are written as JSON text: %s", ", ".join(mixed))
    outputs = pyarrow.schema(parquet.result_fields(form.types()))
    writer = parquet.ParquetWriter(stream, pyarrow.schema([*inputs, *outputs]))
    for chunk in chunks():
        if rows is not None:
            table = rows.take([row.row for row in chunk]).select(inputs.names)
        else:
            table = parquet.to_table([_kept(row, form) for row in chunk], inputs, mixed)
        results = parquet.to_table([_results(row, form) for row in chunk], outputs)
        for field, column in zip(outputs, results.columns, strict=True):
            table = table.append_column(field, column)
        writer.write(table)
    writer.close()


def _kept(row: ResultRow, form: ResultForm) -> dict[str, Any]:
    values = {} if row.raw is None else json.loads(row.raw)
    if row.raw is not None and HALF_SURROGATE in row.raw.lower():
        values = _encodable(values)
    return {name: value for name, value in values.items() if form.keep is None or name in form.keep}


def _encodable(value: Any) -> Any:
    """Halves of surrogate pairs, which JSON can escape and UTF-8 cannot hold, become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _results(row: ResultRow, form: ResultForm) -> dict[str, Any]:
    return form.named(json.loads(f"{{{row.columns}}}"), row.row)
