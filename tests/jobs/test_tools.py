"""Shards into one file; how far a job is."""

from __future__ import annotations

import json

import pytest

from pagedllm import LLM
from pagedllm.jobs.tools import describe_job, merge_shards
from tests.fake_assembly import fake_assemble


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Three shards of ten rows, and the whole."""
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
    (tmp_path / "in").write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(10)))
    params = {"temperature": 0, "max_tokens": 3}
    with LLM("fake") as llm:
        llm.run_file(tmp_path / "in", tmp_path / "whole", sampling_params=params)
        for i in (1, 2, 3):
            llm.run_file(tmp_path / "in", tmp_path / f"s{i}", sampling_params=params, shard=(i, 3))
    return [str(tmp_path / f"s{i}") for i in (3, 1, 2)]


def test_shards_in_any_order_make_the_whole(tmp_path, shards):
    assert merge_shards(shards, str(tmp_path / "merged")) == 10
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(FileExistsError, match="the output exists"):
        merge_shards(shards, str(tmp_path / "merged"))


def test_a_missing_a_double_and_a_foreign_shard_are_refused(tmp_path, shards):
    (tmp_path / "foreign").write_text('{"x": 1}\n')
    for given, text in (
        (shards[:2], "row 1 is missing"),
        ([*shards, shards[0]], "row 2 stands twice"),
        ([str(tmp_path / "foreign")], "no result row at byte 0"),
        ([*shards, str(tmp_path / "merged")], "No such file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            merge_shards(given, str(tmp_path / "merged"))
    with pytest.raises(ValueError, match="are the same file"):
        merge_shards(shards, shards[0])
    assert not (tmp_path / "merged").exists()


def test_status(tmp_path, shards):
    assert describe_job(shards[1]) == f"{shards[1]}: finished, 4 rows, 0 failed, 4 cut"
    with pytest.raises(FileNotFoundError, match="no job wrote this file"):
        describe_job(str(tmp_path / "in"))

    def stop(report):
        if report.num_rows >= 2:
            raise KeyboardInterrupt

    from pagedllm.jobs.opening import open_job

    output = str(tmp_path / "out")
    (tmp_path / "in").write_text('{\n{"prompt": "a"}\n' + '{"prompt": "b", "sampling_params": {"max_tokens": 9}}')
    params = {"max_tokens": 2}
    with (
        LLM("fake") as llm,
        open_job(tmp_path / "in", output, sampling_params=params) as job,
        pytest.raises(KeyboardInterrupt),
    ):
        llm.run_job(job, stop)
    assert describe_job(output) == f"{output}: not finished, 2 results of 3 rows, 1 of them failed"
