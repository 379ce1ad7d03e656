"""Inputs: which lines come, and that each is found again by its place."""

from __future__ import annotations

import gzip
import io
import os
import threading

import pytest

from pagedllm.jobs import formats
from pagedllm.jobs.source import Source

TEXT = b'\xef\xbb\xbf{"a": 1}\n\n  {"b": 2}\r\n{"c": 3}'
ROWS = [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


def read(source: Source) -> list[tuple[int, bytes | None]]:
    """Index and text of each line, which is also found again."""
    lines = list(source.lines())
    for line in reversed(lines):
        assert line.text is None or source.line_at(line.place) == line.text
    return [(line.row, line.text) for line in lines]


def test_a_file(tmp_path):
    (tmp_path / "in").write_bytes(TEXT)
    source = Source(str(tmp_path / "in"))
    assert source.count() == 3
    assert read(source) == list(enumerate(ROWS))
    source.close()


def test_a_compressed_file_a_fifo_and_stdin_are_spooled(tmp_path, monkeypatch):
    (tmp_path / "in.gz").write_bytes(gzip.compress(TEXT))
    os.mkfifo(tmp_path / "fifo")
    thread = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(TEXT,))
    thread.start()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT)))
    for input in (str(tmp_path / "in.gz"), str(tmp_path / "fifo"), "-"):
        source = Source(input, spool_folder=tmp_path)
        assert source.count() == (3 if input.endswith(".gz") else None)  # what is no file is read once
        assert read(source) == list(enumerate(ROWS))
        source.close()
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "in.gz"]


def test_a_pattern_is_its_files_in_order(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\xef\xbb\xbf" + f'{{"{name}": 1}}\n{{"{name}": 2}}\n'.encode())
    source = Source(str(tmp_path / "*.jsonl"))
    names = [f'{{"{name}": {i}}}'.encode() for name in "abc" for i in (1, 2)]
    assert read(source) == list(enumerate(names))
    assert source.count() == 6
    source.close()
    with pytest.raises(FileNotFoundError, match="no file has a name like that"):
        Source(str(tmp_path / "*.txt"))


def test_limit_and_shard_keep_the_rows_numbers(tmp_path):
    (tmp_path / "in").write_text("".join(f"{{{i}}}\n" for i in range(10)))
    parts = []
    for shard in ((1, 3), (2, 3), (3, 3)):
        source = Source(str(tmp_path / "in"), limit=8, shard=shard)
        indices = [index for index, _ in read(source)]
        assert source.count() == len(indices)
        parts.append(indices)
        source.close()
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_the_digest_tells_inputs_apart(tmp_path):
    digests = []
    for text in (b"a\nb\n", b"a\nb", b"ab\n", b"a\nc\n"):
        (tmp_path / "in").write_bytes(text)
        source = Source(str(tmp_path / "in"))
        read(source)
        digests.append(source.digest)
        source.close()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_line_too_long_is_none_and_is_not_spooled(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 20)
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"x" * 50 + b"\nyes\n"))
    source = Source(str(tmp_path / "in.gz"), spool_folder=tmp_path)
    assert read(source) == [(0, None), (1, b"yes")]
    source.close()


def test_damage_and_folders_are_errors_of_the_file(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TEXT * 1000)[:-30])
    (tmp_path / "plain.gz").write_bytes(TEXT)
    for name in ("cut.gz", "plain.gz"):
        with pytest.raises(OSError, match=f"the compressed input is damaged: .*{name}"):
            list(Source(str(tmp_path / name)).lines())
    with pytest.raises(IsADirectoryError, match="the input is a folder"):
        Source(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        Source(str(tmp_path / "missing"))
