"""Plain rows: one JSON object a line in, the same object with the result's columns out.

A row's `prompt` or `messages` and its `sampling_params` are read; every other field is data and comes back byte for
byte, since a result line is the input line, or the part of it that is kept (result_form.py), with columns added before
its last brace. A line that cannot be read becomes a row with the columns alone, so no line is ever lost. Blank lines
are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from pagedllm.errors import PagedLLMError, RequestError
from pagedllm.jobs.prompting import PromptForm
from pagedllm.jobs.score_rows import continuation_of
from pagedllm.prompts import Prompt, brief

MAX_LINE_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COLUMNS_HEAD = b'"output": '  # the first of the result's columns
LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}  # JSON allows them raw, str.splitlines breaks


@dataclass(frozen=True, slots=True)
class Row:
    """index: 0-based among the rows of the whole input; raw: the object's text, None where the line is unreadable."""

    index: int
    prompt: Prompt
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    raw: str | None = None
    identity: bytes | None = None  # what its key is made of, where that is not prompt and params
    continuation: str | None = None  # to be scored


class JobRefused(PagedLLMError, ValueError):
    """The files there belong to another job, or the lines to more than one. No result was touched."""


class LineError(ValueError):
    """A line is no row; the text says why."""


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(offset, text) of the lines that are not blank; no ends, and None for a line of more than MAX_LINE_BYTES."""
    offset = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        end = offset + len(line)
        text: bytes | None = line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            text = None
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
                end += len(line)
        if text is None or (text := text.strip()):
            yield offset, text
        offset = end


class PlainRows:
    """The plain rows of one job."""

    def __init__(
        self, prompts: PromptForm, reserved: Collection[str], *, is_table: bool = False, is_scored: bool = False
    ) -> None:
        """reserved: names that no field may have; is_table: objects may be JSON text; is_scored: rows have a
        continuation."""
        self._prompts = prompts
        self._reserved = reserved
        self._is_table = is_table
        self._is_scored = is_scored

    def parse(self, line: bytes | None, index: int, fault: str = "") -> Row:
        """The row of a line; what is wrong with it is its prompt's error. fault: what its reader says of it."""
        raw: str | None = None
        try:
            values = parse_object(line, fault)
            clash = next((name for name in values if name in self._reserved), None)
            if clash is not None:
                text = f"the field {clash!r} has the name of a result column: rename it"
                return Row(index, Prompt(error=RequestError("invalid_json_line", text)))
            raw = (line or b"").decode()
            if self._is_table:
                values = _with_objects(values)
            continuation = continuation_of(values) if self._is_scored else None
            params = _parse_params(values.get("sampling_params"))
            return Row(index, self._prompts.prompt(values), params, raw, continuation=continuation)
        except LineError as error:
            return Row(index, Prompt(error=RequestError("invalid_json_line", str(error))))
        except RequestError as error:
            return Row(index, Prompt(error=error), raw=raw)


def result_line(raw: str | None, columns: str) -> bytes:
    """One line with its newline: the input's fields as they were, then the columns (JSON without braces)."""
    head = "{" if raw is None else raw[:-1].rstrip().translate(LINE_BREAKS)
    return f"{head}{'' if head == '{' else ', '}{columns}}}\n".encode()


def columns_text(columns: Mapping[str, Any]) -> str:
    """JSON without braces, on one line for every reader."""
    return json.dumps(columns, ensure_ascii=False)[1:-1].translate(LINE_BREAKS)


def parse_object(line: bytes | None, fault: str = "") -> dict[str, Any]:
    """Raises LineError for a line that is no JSON object, or has a fault; None is one that was too long."""
    if fault:
        raise LineError(fault)
    if line is None:
        raise LineError(f"the line has more than {MAX_LINE_BYTES:,} bytes")
    value = parse_json(line)
    if not isinstance(value, dict):
        raise LineError(f"a row must be a JSON object, got {brief(value)}")
    return value


def parse_json(text: bytes) -> Any:
    """Strictly: no NaN, no field twice. Raises LineError."""
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except LineError:
        raise
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise LineError("nested too deeply") from None
    except ValueError as error:  # JSONDecodeError; also an int of thousands of digits
        hint = "; no array over several lines is read, each line is an object" if text.startswith(b"[") else ""
        raise LineError(f"not JSON: {error}{hint}") from None


def _parse_params(params: object) -> Mapping[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, dict):
        text = f"sampling_params must be an object, got {brief(params)}"
        raise RequestError("invalid_parameter", text, field="sampling_params")
    return params


def _with_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row with the JSON text of `messages` and `sampling_params` read; empty text is none."""
    values = dict(values)
    for name in ("messages", "sampling_params"):
        text = values.get(name)
        if isinstance(text, str):
            try:
                values[name] = parse_json(text.encode()) if text.strip() else None
            except LineError as error:
                raise RequestError("invalid_parameter", f"{name}: {error}", field=name) from None
    if values.get("messages") is not None and values.get("prompt") == "":
        del values["prompt"]
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise LineError(f"the field {brief(repeated)} stands twice in one object")
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise LineError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise LineError(f"the number {text[:40]} is beyond the floats")
    return value
