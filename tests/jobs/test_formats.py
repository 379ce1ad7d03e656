"""Lines in, rows out: what is read, what is refused with which words, and what a result line keeps."""

from __future__ import annotations

import io
import json

import pytest

from pagedllm.jobs import formats
from pagedllm.jobs.formats import PlainRows, Row, columns_text, read_lines, result_line
from pagedllm.jobs.prompting import PromptForm
from pagedllm.jobs.result_form import ResultForm

COLUMNS = {"output": "x", "row": 0}
parse_row = PlainRows(PromptForm(), ResultForm().reserved()).parse


def read_rows(stream: io.BytesIO) -> list[Row]:
    return [parse_row(text, index) for index, (_, text) in enumerate(read_lines(stream))]


def written(row: Row, columns: dict) -> bytes:
    return result_line(row.raw, columns_text(columns))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[]", "a row must be a JSON object, got [] (list)"),
        (b"1", "a row must be a JSON object, got 1 (int)"),
        (b'"x"', "a row must be a JSON object, got 'x' (str)"),
        (b"null", "a row must be a JSON object, got None (NoneType)"),
        (b'{"prompt": "a\x00b"}', "not JSON: Invalid control character"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"prompt": "a", "x": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "x": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": "a", "x": 1e999}', "the number 1e999 is beyond the floats"),
        (b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"prompt": "a", "prompt": "b"}', "the field 'prompt' (str) stands twice in one object"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 2}}', "the field 'y' (str) stands twice in one object"),
        (b'{"prompt": "a", "output": 1}', "the field 'output' has the name of a result column: rename it"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not JSON: Extra data"),
    ],
)
def test_an_unreadable_line_is_an_invalid_json_line_and_has_the_columns_only(line, text):
    row = parse_row(line, 0)
    assert row.prompt.error.code == "invalid_json_line"
    assert row.prompt.error.message.startswith(text)
    assert json.loads(written(row, COLUMNS)) == COLUMNS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{}", "the row has neither 'prompt' nor 'messages'"),
        (
            b'{"text": "a", "1": 1, "2": 2, "3": 3, "4": 4}',
            "the row has neither 'prompt' nor 'messages', but 'text', '1', '2', '3', ...: --template makes prompts of "
            "columns",
        ),
        (b'{"prompt": null}', "the row has neither 'prompt' nor 'messages'"),
        (b'{"prompt": 5}', "prompt must be a string, got 5 (int)"),
        (b'{"prompt": [1, 2]}', "prompt must be a string, got [1, 2] (list)"),
        (b'{"messages": "hi"}', "messages must be a list of messages, got 'hi' (str)"),
        (b'{"prompt": "a", "messages": []}', "the row has both 'prompt' and 'messages'"),
        (b'{"prompt": "a", "sampling_params": 3}', "sampling_params must be an object, got 3 (int)"),
    ],
)
def test_a_readable_row_without_a_usable_prompt_keeps_its_fields(line, text):
    row = parse_row(line, 0)
    assert (row.prompt.error.code, row.prompt.error.message) == ("invalid_parameter", text)
    assert json.loads(written(row, COLUMNS)) == {**json.loads(line), **COLUMNS}


def test_prompt_messages_and_sampling_params_are_read():
    row = parse_row(b'{"id": 1, "prompt": "a", "messages": null, "sampling_params": {"top_k": 3}}', 4)
    assert (row.index, row.prompt.text, row.sampling_params) == (4, "a", {"top_k": 3})
    assert parse_row(b'{"messages": [{"role": "user"}]}', 0).prompt.messages == [{"role": "user"}]
    assert parse_row(b'{"prompt": "a", "sampling_params": null}', 0).sampling_params == {}


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (b'{"prompt":"a","x":1.10,"y":12345678901234567890123}',
         b'{"prompt":"a","x":1.10,"y":12345678901234567890123, "output": "x", "row": 0}\n'),
        (b'  {"b": "\\u00e9\\ud800", "a": null, "prompt": "" }\r\n',
         b'{"b": "\\u00e9\\ud800", "a": null, "prompt": "", "output": "x", "row": 0}\n'),
        ('{"ключ": "é", "prompt": "p"}'.encode(), '{"ключ": "é", "prompt": "p", "output": "x", "row": 0}\n'.encode()),
        (b"{ }", b'{"output": "x", "row": 0}\n'),
    ],
)  # fmt: skip
def test_fields_come_back_byte_for_byte_and_in_order(line, result):
    (row,) = read_rows(io.BytesIO(line))
    assert written(row, COLUMNS) == result


def test_a_result_is_one_line_for_every_reader():
    row = parse_row('{"prompt": "a\u2028\x85"}'.encode(), 0)
    line = written(row, {"output": "b\u2029\n\r\x1c"}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"prompt": "a\u2028\x85", "output": "b\u2029\n\r\x1c"}


def test_blank_lines_are_no_rows_and_a_byte_order_mark_is_no_text():
    rows = read_rows(io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}'))
    assert [(row.index, row.prompt.text) for row in rows] == [(0, "a"), (1, "b")]


def test_a_line_that_is_too_long_is_a_row_with_an_error_and_the_next_is_read(monkeypatch):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 20)
    long, fits = b'{"prompt": "' + b"a" * 50 + b'"}', b'{"prompt": "123456"}'
    rows = read_rows(io.BytesIO(long + b"\n" + fits + b"\n" + long))
    assert [row.prompt.text for row in rows] == [None, "123456", None]
    assert rows[0].prompt.error.message == "the line has more than 20 bytes"
