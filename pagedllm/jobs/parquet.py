"""Parquet in and out, by pyarrow (the extra `tables`): the input's own columns keep their types, new ones are fixed.

`read_rows` gives rows as JSON, for the prompts in them. What a result file keeps of a Parquet input is taken from the
file itself (`OriginalRows`), never from that JSON; of other inputs it is inferred from all rows (`infer_schema`).
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

from pagedllm.errors import NotSupportedError
from pagedllm.jobs.csv_records import TableError

BATCH_ROWS = 4096


def need_pyarrow(path: str) -> ModuleType:
    """Raises NotSupportedError where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        text = f"{path!r}: Parquet needs pyarrow: pip install 'pagedllm[tables]', or use .jsonl or .csv"
        raise NotSupportedError(text) from error
    module: ModuleType = pyarrow
    return module


def read_rows(path: str) -> Iterator[bytes]:
    """The rows as JSON objects: dates and decimals as text, bytes in base64, NaN as null. Raises TableError."""
    with _open(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            yield from map(to_json, batch.to_pylist())


def count_rows(path: str) -> int:
    with _open(path) as file:
        return int(file.metadata.num_rows)


def to_json(values: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except ValueError:  # NaN
        return json.dumps(_without_nan(values), ensure_ascii=False, default=_plain).encode()


class OriginalRows:
    """The rows of Parquet files by their number, as they are. Forwards only one batch is held; else all rows."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._pyarrow = need_pyarrow(paths[0])
        self._paths = paths
        self.schema = _schema(paths)
        self._batches = self._read()
        self._begin, self._batch = 0, self._pyarrow.table([[]] * len(self.schema), schema=self.schema)
        self._whole: Any = None

    def take(self, rows: Sequence[int]) -> Any:
        """A pyarrow.Table of these rows."""
        is_forwards = self._whole is None and rows[0] >= self._begin and all(a < b for a, b in pairwise(rows))
        if not is_forwards:
            if self._whole is None:
                self._whole = self._pyarrow.concat_tables(self._read())
            return self._whole.take(rows)
        parts, position = [], 0
        while position < len(rows):
            end = self._begin + self._batch.num_rows
            inside = [row - self._begin for row in rows[position:] if row < end]
            if inside:
                parts.append(self._batch.take(inside))
                position += len(inside)
            if position < len(rows):
                self._begin, self._batch = end, next(self._batches)
        return self._pyarrow.concat_tables(parts)

    def _read(self) -> Iterator[Any]:
        for path in self._paths:
            with _open(path) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield self._pyarrow.Table.from_batches([batch]).replace_schema_metadata(self.schema.metadata)


class ParquetWriter:
    """Batches of rows into one file. schema: of all columns."""

    def __init__(self, stream: Any, schema: Any) -> None:
        self._pyarrow = need_pyarrow("")
        self.schema = schema
        self._writer = self._pyarrow.parquet.ParquetWriter(stream, schema)

    def write(self, table: Any) -> None:
        self._writer.write_table(table.cast(self.schema))

    def close(self) -> None:
        self._writer.close()


def result_fields(columns: Mapping[str, str]) -> list[Any]:
    """Fields of the result's columns. columns: name -> type, with [] for each list; "float" has 32 bits."""
    pyarrow = need_pyarrow("")
    top = pyarrow.struct(
        [
            ("token_id", pyarrow.int32()),
            ("token", pyarrow.string()),
            ("logprob", pyarrow.float32()),
            ("rank", pyarrow.int32()),
        ]
    )
    kinds = {"string": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float32(), "top": top}
    kinds |= {"double": pyarrow.float64(), "bool": pyarrow.bool_()}
    fields = []
    for name, text in columns.items():
        kind = kinds[text.rstrip("[]")]
        for _ in range(text.count("[]")):
            kind = pyarrow.list_(kind)
        fields.append(pyarrow.field(name, kind))
    return fields


def infer_schema(chunks: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[Any, list[str]]:
    """Of rows of JSON values; and the names of columns whose values have no common type, which become JSON text."""
    pyarrow = need_pyarrow("")
    kinds: dict[str, Any] = {}
    for rows in chunks:
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            kinds[name] = _common(kinds.get(name, pyarrow.null()), values)
    mixed = [name for name, kind in kinds.items() if kind is None]
    return pyarrow.schema([(name, kind or pyarrow.string()) for name, kind in kinds.items()]), mixed


def to_table(rows: Sequence[Mapping[str, Any]], schema: Any, mixed: Sequence[str] = ()) -> Any:
    """Rows of JSON values; what a row lacks is null."""
    pyarrow = need_pyarrow("")
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if field.name in mixed:
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        arrays.append(pyarrow.array(values, field.type))
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _common(kind: Any, values: Sequence[Any]) -> Any:
    """The type of both; None where there is none, or none that Parquet can hold."""
    pyarrow = need_pyarrow("")
    if kind is None:
        return None
    try:
        found = pyarrow.array(values).type
        both = [pyarrow.schema([("x", kind)]), pyarrow.schema([("x", found)])]
        common = pyarrow.unify_schemas(both, promote_options="permissive").field(0).type
        pyarrow.array(values, common)
    except (pyarrow.ArrowException, OverflowError, TypeError):
        return None
    return None if _has_empty_struct(common) else common


def _has_empty_struct(kind: Any) -> bool:
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return str(kind) == "struct<>" or any(map(_has_empty_struct, children))


def _schema(paths: Sequence[str]) -> Any:
    schema = None
    for path in paths:
        with _open(path) as file:
            found = file.schema_arrow
        if schema is not None and not found.equals(schema):
            raise TableError(f"{path}: its columns or their types are not those of {paths[0]}")
        schema = schema or found
    return schema


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    pyarrow = need_pyarrow(path)
    with open(path, "rb") as stream:
        try:
            file = pyarrow.parquet.ParquetFile(stream)
        except pyarrow.ArrowException as error:
            raise TableError(f"{path}: not a Parquet file that can be read: {error}") from None
        names = file.schema_arrow.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TableError(f"{path}: two columns are named {twice!r}")
        yield file


def _plain(value: object) -> Any:
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return str(value)  # decimals


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
