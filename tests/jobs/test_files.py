"""The files of a job: what is refused before any work, and that only whole lines are ever there."""

from __future__ import annotations

import os
import resource

import pytest

from pagedllm import NotSupportedError
from pagedllm.jobs.files import ResultFile, open_input


@pytest.fixture
def input(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    return path


def test_results_get_their_name_at_the_end(tmp_path, input):
    output = tmp_path / "out.jsonl"
    results = ResultFile(str(output), str(input))
    results.write(b"one\n")
    assert results.partial == tmp_path / "out.jsonl.partial"
    assert results.partial.read_bytes() == b"one\n"  # on disk at once
    assert not output.exists()
    results.write(b"two\n")
    results.commit()
    results.close()
    assert output.read_bytes() == b"one\ntwo\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_unfinished_file_stays_and_an_empty_one_goes(tmp_path, input):
    results = ResultFile(str(tmp_path / "a"), str(input))
    results.write(b"one\n")
    results.close()
    assert (tmp_path / "a.partial").read_bytes() == b"one\n"
    ResultFile(str(tmp_path / "b"), str(input)).close()
    assert not (tmp_path / "b.partial").exists()


def test_an_existing_output_stays_until_the_new_one_is_finished(tmp_path, input):
    output = tmp_path / "out"
    output.write_text("old")
    with pytest.raises(FileExistsError, match="the output exists; if_exists='overwrite'"):
        ResultFile(str(output), str(input))
    with pytest.raises(FileExistsError):
        ResultFile(str(output), str(input), "fail")
    results = ResultFile(str(output), str(input), "overwrite")
    results.write(b"new\n")
    assert output.read_text() == "old"
    results.commit()
    results.close()
    assert output.read_text() == "new\n"


def test_what_an_earlier_run_left_is_not_overwritten_unasked(tmp_path, input):
    (tmp_path / "out.partial").write_text("earlier\n")
    with pytest.raises(FileExistsError, match="an earlier run left its first results here"):
        ResultFile(str(tmp_path / "out"), str(input))
    assert (tmp_path / "out.partial").read_text() == "earlier\n"
    results = ResultFile(str(tmp_path / "out"), str(input), "overwrite")
    results.write(b"new\n")
    results.commit()
    results.close()
    assert (tmp_path / "out").read_text() == "new\n"


@pytest.mark.parametrize("name", ["in.jsonl", "./in.jsonl", "symlink", "hardlink"])
def test_input_and_output_must_not_be_one_file(tmp_path, input, name):
    (tmp_path / "symlink").symlink_to(input)
    os.link(input, tmp_path / "hardlink")
    with pytest.raises(ValueError, match="are the same file"):
        ResultFile(str(tmp_path / name), str(input), "overwrite")
    assert input.read_text() == "{}\n"


def test_the_input_must_not_be_the_partial_file(tmp_path):
    partial = tmp_path / "out.partial"
    partial.write_text("{}\n")
    with pytest.raises(ValueError, match="are the same file"):
        ResultFile(str(tmp_path / "out"), str(partial), "overwrite")


def test_a_symlink_as_output_stays_one(tmp_path, input):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    results = ResultFile(str(tmp_path / "link"), str(input), "overwrite")
    results.write(b"new\n")
    results.commit()
    results.close()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new\n"


def test_folders_are_checked(tmp_path, input):
    with pytest.raises(FileNotFoundError, match="the output's folder does not exist"):
        ResultFile(str(tmp_path / "missing" / "out"), str(input))
    with pytest.raises(IsADirectoryError, match="the output is a folder"):
        ResultFile(str(tmp_path), str(input))
    with pytest.raises(IsADirectoryError, match="the input is a folder"), open_input(str(tmp_path)):
        pass
    with pytest.raises(FileNotFoundError), open_input(str(tmp_path / "missing")):
        pass


def test_resume_is_refused_by_name_and_other_words_too(tmp_path, input):
    with pytest.raises(NotSupportedError, match="if_exists='resume' is not supported yet"):
        ResultFile(str(tmp_path / "out"), str(input), "resume")
    with pytest.raises(ValueError, match="if_exists must be 'resume', 'overwrite' or 'fail', got 'append'"):
        ResultFile(str(tmp_path / "out"), str(input), "append")


def test_a_full_device_is_an_error():
    results = ResultFile("/dev/full", "-")
    with pytest.raises(OSError, match="No space left"):
        results.write(b"one\n")
    results.close()


def test_a_line_that_did_not_fit_leaves_no_torn_end(tmp_path, input):
    results = ResultFile(str(tmp_path / "out"), str(input))
    results.write(b"0123456789\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            results.write(b"0123456789\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    results.close()
    assert (tmp_path / "out.partial").read_bytes() == b"0123456789\n"


def test_a_fifo_is_written_as_it_is(tmp_path, input):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    results = ResultFile(str(fifo), str(input))
    results.write(b"one\n")
    assert os.read(reader, 100) == b"one\n"
    results.commit()
    results.close()
    os.close(reader)
    assert results.partial is None
