"""Comma- or tab-separated records, as RFC 4180 has them: read one by one with no limit of their size but a line's.

Every value is text; nothing is guessed, so "007" stays "007". A quoted field may hold line breaks and doubled quotes;
a quote inside an unquoted field is a character like any other. Blank lines are no records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from pagedllm.jobs.formats import BYTE_ORDER_MARK, MAX_LINE_BYTES

DELIMITERS = {"csv": ",", "tsv": "\t"}
QUOTED = re.compile(r'"((?:[^"]+|"")*)("?)')
NOT_CLOSED = "a quoted field is not closed"


class TableError(ValueError):
    """A table that cannot be read or written as a whole; the text says why."""


def read_records(stream: BinaryIO, delimiter: str) -> Iterator[tuple[bytes | None, str]]:
    """The records behind the header as JSON objects, or None and why not.

    Raises TableError for a header with a name twice, one that is not UTF-8 or none at all.
    """
    records = _records(stream, delimiter)
    first = next(records, None)
    if first is None:
        return
    names, fault = _split(first, delimiter)
    if names is None:
        raise TableError(f"the header: {fault}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TableError(f"the header names {twice!r} twice")
    for text in records:
        fields, fault = _split(text, delimiter)
        if fields is None:
            yield None, fault
        elif len(fields) != len(names):
            yield None, f"the record has {len(fields):,} fields, the header {len(names):,}"
        else:
            yield json.dumps(dict(zip(names, fields, strict=True)), ensure_ascii=False).encode(), ""


def record(fields: Sequence[str | None], delimiter: str) -> str:
    """One record with its end. None is an empty field without quotes, "" one with them."""
    return delimiter.join("" if field is None else _quoted(field, delimiter) for field in fields) + "\n"


def _quoted(field: str, delimiter: str) -> str:
    is_plain = not any(c in field for c in ('"', "\n", "\r", delimiter)) and field == field.strip()
    return field if is_plain and field else '"' + field.replace('"', '""') + '"'


def _records(stream: BinaryIO, delimiter: str) -> Iterator[bytes | None]:
    """Whole records without their ends; None for one of more than MAX_LINE_BYTES."""
    is_first = True
    while line := stream.readline(MAX_LINE_BYTES + 1):
        parts, size = [line.removeprefix(BYTE_ORDER_MARK) if is_first else line], len(line)
        is_first, is_open = False, _leaves_open(parts, delimiter)
        while (is_open or not line.endswith(b"\n")) and (line := stream.readline(MAX_LINE_BYTES + 1)):
            size += len(line)
            if size <= MAX_LINE_BYTES:
                parts.append(line)
            if line.count(b'"') % 2:  # an even number opens and closes, or is doubled
                is_open = _leaves_open(parts, delimiter) if size <= MAX_LINE_BYTES else not is_open
        record = b"".join(parts).rstrip(b"\r\n")
        if record.strip():
            yield record if size <= MAX_LINE_BYTES else None


def _leaves_open(parts: list[bytes], delimiter: str) -> bool:
    """Whether a quoted field goes on behind these lines."""
    if len(parts) == 1 and parts[0].count(b'"') % 2 == 0:
        return False
    return _fields(b"".join(parts).decode(errors="replace"), delimiter) is None


def _split(record: bytes | None, delimiter: str) -> tuple[list[str] | None, str]:
    """The fields, or None and what is wrong."""
    if record is None:
        return None, f"the record has more than {MAX_LINE_BYTES:,} bytes"
    try:
        text = record.decode()
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    fields = _fields(text, delimiter)
    return fields, "" if fields is not None else NOT_CLOSED


def _fields(text: str, delimiter: str) -> list[str] | None:
    """None where a quoted field is not closed."""
    if '"' not in text:
        return text.split(delimiter)
    fields: list[str] = []
    position = 0
    while True:
        field = ""
        match = QUOTED.match(text, position)
        if match is not None:
            if not match[2]:
                return None
            field, position = match[1].replace('""', '"'), match.end()
        end = text.find(delimiter, position)
        if end < 0:
            return [*fields, field + text[position:].rstrip("\r\n")]
        fields.append(field + text[position:end])
        position = end + len(delimiter)
