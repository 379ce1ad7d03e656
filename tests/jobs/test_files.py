"""The files of a job: what is refused before any work, and that only whole lines are ever there."""

from __future__ import annotations

import json
import os
import resource

import pytest

from pagedllm.jobs.files import JobFiles, StreamFile, is_stream
from pagedllm.jobs.formats import JobRefused
from pagedllm.jobs.journal import Journal, write_manifest

JOB = {"model": "m", "sampling": {"max_tokens": 4}}
ID = bytes(range(1, 17))
COLUMNS = {"output": "é\u2028", "finish_reason": "stop", "stop_reason": "", "completion_tokens": 3, "error": ""}


@pytest.fixture
def input(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    return path


def files_of(output, input, if_exists="resume") -> JobFiles:
    files = JobFiles(str(output))
    files.claim([str(input)], if_exists)
    return files


def test_a_journal_line_is_on_disk_at_once_and_found_again(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append([(ID, 7, COLUMNS)])
    (line,) = (tmp_path / "j").read_text().split("\n")[:-1]
    assert json.loads(line) == {"id": ID.hex(), "row": 7, **COLUMNS}
    journal.close()
    journal = Journal(tmp_path / "j")
    found = journal.find([ID, b"x" * 16])
    assert found.tolist() == [0, -1]
    assert (journal.num_tokens(found)[0], journal.rows(found)[0], journal.num_lines) == (3, 7, 1)
    assert json.loads(b"{" + journal.columns_at(0) + b"}") == COLUMNS
    journal.close()


def test_the_latest_line_of_an_id_counts(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append([(ID, 0, COLUMNS), (ID, 0, {**COLUMNS, "output": "new"})])
    assert journal.find([ID]).tolist() == [-1]  # not indexed yet
    journal.index()
    assert json.loads(b"{" + journal.columns_at(journal.find([ID])[0]) + b"}")["output"] == "new"
    journal.close()


@pytest.mark.parametrize("tail", [b'{"id": "ab', b"\x00" * 30, b"x"])
def test_a_torn_last_line_is_cut_off_before_anything_is_appended(tmp_path, tail):
    journal = Journal(tmp_path / "j")
    journal.append([(ID, 0, COLUMNS)])
    journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + tail)
    journal = Journal(tmp_path / "j")
    assert ((tmp_path / "j").read_bytes(), journal.num_lines, journal.num_damaged) == (whole, 1, 0)
    journal.append([(b"y" * 16, 1, COLUMNS)])
    assert json.loads(b"{" + journal.columns_at(1) + b"}") == COLUMNS
    journal.close()


@pytest.mark.parametrize(
    "damage", [b"\x00" * 30, b"{}", b'{"id": "zz"}', b'{"id": "00", "row": 1, "output": ""}', b"[]"]
)
def test_a_damaged_line_in_the_middle_costs_itself_only(tmp_path, damage):
    journal = Journal(tmp_path / "j")
    journal.append([(ID, 0, COLUMNS)])
    journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(damage + b"\n" + whole)
    journal = Journal(tmp_path / "j")
    assert (journal.num_lines, journal.num_damaged) == (1, 1)
    assert json.loads(b"{" + journal.columns_at(journal.find([ID])[0]) + b"}") == COLUMNS
    journal.close()


def test_two_runs_cannot_write_one_journal(tmp_path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(FileExistsError, match="another run is writing this file"):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


def test_a_line_that_did_not_fit_leaves_no_torn_end(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append([(ID, 0, COLUMNS)])
    size = (tmp_path / "j").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append([(b"y" * 16, 1, COLUMNS)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    assert (tmp_path / "j").stat().st_size == size


def test_a_foreign_file_is_refused_and_stays(tmp_path, input):
    (tmp_path / "out").write_text("old")
    with pytest.raises(FileExistsError, match="not of a job that can be continued; if_exists='overwrite'"):
        files_of(tmp_path / "out", input)
    with pytest.raises(FileExistsError, match="the output exists; if_exists='overwrite'"):
        files_of(tmp_path / "out", input, "fail")
    (tmp_path / "other.partial").write_text("old")
    with pytest.raises(FileExistsError, match="not of a job that can be continued"):
        files_of(tmp_path / "other", input)
    (tmp_path / "third.manifest.json").write_text("{")
    with pytest.raises(ValueError, match="not the manifest of a job"):
        files_of(tmp_path / "third", input)
    write_manifest(tmp_path / "fourth.manifest.json", {"format": 7})
    with pytest.raises(ValueError, match="not a manifest that this version of pagedllm reads"):
        files_of(tmp_path / "fourth", input)
    files_of(tmp_path / "out", input, "overwrite")
    assert (tmp_path / "out").read_text() == "old"


@pytest.mark.parametrize(
    ("change", "may_grow", "text"),
    [
        ({"model": "n"}, False, "another model: 'm' -> 'n'; if_exists='overwrite'"),
        ({"sampling": {"max_tokens": 4, "top_k": 3}}, False, "another top_k: 'unset' -> 3;"),
        ({"sampling": {"max_tokens": 8}}, False, "another max_tokens: 4 -> 8; it may grow with --retry cut;"),
        ({"sampling": {"max_tokens": 3}}, True, "another max_tokens: 4 -> 3;"),
        ({"sampling": {"max_tokens": 8}}, True, None),
        ({"sampling": {"max_tokens": None}}, True, None),
        ({}, False, None),
    ],
)
def test_only_the_same_job_is_continued(tmp_path, input, change, may_grow, text):
    files = files_of(tmp_path / "out", input)
    files.begin(JOB, may_grow=False).append([(ID, 0, COLUMNS)])
    files.note(JOB, "running")
    files.close()
    files = files_of(tmp_path / "out", input)
    if text is None:
        assert files.begin({**JOB, **change}, may_grow=may_grow).num_lines == 1
    else:
        with pytest.raises(JobRefused, match=text):
            files.begin({**JOB, **change}, may_grow=may_grow)
    files.close()


def test_a_job_without_a_result_leaves_no_file(tmp_path, input):
    files = files_of(tmp_path / "out", input)
    files.begin(JOB, may_grow=False)
    files.note(JOB, "running")
    files.close()
    files.close()
    assert list(tmp_path.iterdir()) == [input]


@pytest.mark.parametrize("name", ["in.jsonl", "./in.jsonl", "symlink", "hardlink"])
def test_input_and_output_must_not_be_one_file(tmp_path, input, name):
    (tmp_path / "symlink").symlink_to(input)
    os.link(input, tmp_path / "hardlink")
    with pytest.raises(ValueError, match="are the same file"):
        files_of(tmp_path / name, input, "overwrite")
    assert input.read_text() == "{}\n"


@pytest.mark.parametrize("suffix", ["partial", "manifest.json", "new"])
def test_the_input_must_be_none_of_the_companions(tmp_path, suffix):
    path = tmp_path / f"out.{suffix}"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="are the same file"):
        files_of(tmp_path / "out", path, "overwrite")


def test_folders_are_checked(tmp_path, input):
    with pytest.raises(FileNotFoundError, match="the output's folder does not exist"):
        files_of(tmp_path / "missing" / "out", input)
    with pytest.raises(IsADirectoryError, match="the output is a folder"):
        files_of(tmp_path, input)


def test_a_full_device_is_an_error():
    assert is_stream("/dev/full")
    results = StreamFile("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        results.write(b"one\n")
    results.close()


def test_a_fifo_is_written_as_it_is(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert is_stream(str(fifo))
    results = StreamFile(str(fifo))
    results.write(b"one\n")
    assert os.read(reader, 100) == b"one\n"
    results.close()
    os.close(reader)
