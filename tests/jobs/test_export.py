"""The results by now, in another kind of file."""

from __future__ import annotations

import gzip
import json

import pytest

from pagedllm import LLM, cli
from tests.fake_assembly import fake_assemble

PARAMS = {"temperature": 0, "max_tokens": 3}


class Stopped(Exception):
    pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs rows into `out.jsonl`; stop_after: an exception in this step."""
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)

    def run(rows, stop_after=None, output="out.jsonl", **options):
        (tmp_path / "in.jsonl").write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows))

        def script(step, plan):
            if step == stop_after:
                raise Stopped

        with LLM("fake", max_num_seqs=4) as llm:
            llm._assembly.runtime.script = script
            try:
                llm.run_file(tmp_path / "in.jsonl", tmp_path / output, **{"sampling_params": PARAMS, **options})
            except Stopped:
                assert stop_after is not None

    return run


@pytest.fixture
def export(tmp_path):
    def export(target, *flags, output="out.jsonl"):
        return cli.main(["export", str(tmp_path / output), "-o", str(tmp_path / target), *flags])

    return export


def rows_of(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as stream:
        return [json.loads(line) for line in stream]


ROWS = [{"id": i, "prompt": f"p{i}", "x": {"y": [i]}} for i in range(20)]


def test_a_finished_job_becomes_any_kind_of_file(tmp_path, run, export):
    run([*ROWS, "{"])
    whole = (tmp_path / "out.jsonl").read_bytes()
    assert [export(f"e.{kind}") for kind in ("jsonl", "jsonl.gz", "csv", "tsv", "parquet")] == [0] * 5
    assert (tmp_path / "e.jsonl").read_bytes() == gzip.decompress((tmp_path / "e.jsonl.gz").read_bytes()) == whole
    for kind in ("csv", "tsv", "parquet"):
        run([*ROWS, "{"], output=f"direct.{kind}")
        assert (tmp_path / f"e.{kind}").read_bytes() == (tmp_path / f"direct.{kind}").read_bytes()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_becomes_json_lines(tmp_path, run, export, kind):
    run([*ROWS, "{"], output=f"out.{kind}")
    assert export("e.jsonl", output=f"out.{kind}") == 0
    run([*ROWS, "{"])
    names = ("output", "finish_reason", "prompt_tokens", "error", "row")
    found, whole = rows_of(tmp_path / "e.jsonl"), rows_of(tmp_path / "out.jsonl")
    assert [[row[name] for name in names] for row in found] == [[row[name] for name in names] for row in whole]


@pytest.mark.parametrize("target", ["e.jsonl", "e.jsonl.gz"])
def test_of_an_unfinished_job_the_results_by_now_are_written_and_it_goes_on(tmp_path, run, export, target):
    run(["{", *ROWS], stop_after=12, keep=["id"], output_prefix="p_")
    assert export(target) == 0
    found = rows_of(tmp_path / target)
    run(["{", *ROWS], keep=["id"], output_prefix="p_")
    whole = {row["p_row"]: row for row in rows_of(tmp_path / "out.jsonl")}
    assert 3 < len(found) < len(whole)
    assert found == [whole[row["p_row"]] for row in found]
    assert [row["p_row"] for row in found] == sorted(row["p_row"] for row in found)


def test_of_an_unfinished_job_whose_input_is_gone_the_results_columns_are_written(tmp_path, run, export, caplog):
    run(ROWS, stop_after=12)
    (tmp_path / "in.jsonl").unlink()
    assert export("e.csv") == 0
    header = (tmp_path / "e.csv").read_text().splitlines()[0]
    assert header == "output,finish_reason,stop_reason,prompt_tokens,completion_tokens,error,row"
    assert "the input is not there as it was" in caplog.text


def test_of_an_unfinished_job_whose_input_was_edited_nothing_is_guessed(tmp_path, run, export, capsys):
    run(ROWS, stop_after=12)
    run(ROWS[3:], stop_after=2)
    assert export("e.csv") == 2
    assert "which row a result is of is known at its end only" in capsys.readouterr().err
    assert not (tmp_path / "e.csv").exists()


def test_openai_answers_are_exported_as_lines_only(tmp_path, run, export, capsys):
    body = {"model": "m", "prompt": "a", "temperature": 0, "max_tokens": 2}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"{i}"}}
        for i in range(20)
    ]
    run(lines, stop_after=8, sampling_params=None)
    assert export("e.jsonl.gz") == 0
    run(lines, sampling_params=None)
    whole = (tmp_path / "out.jsonl").read_bytes()
    found = gzip.decompress((tmp_path / "e.jsonl.gz").read_bytes()).splitlines()
    assert 3 < len(found) < 20
    assert set(found) < set(whole.splitlines())
    assert export("e.csv") == 2
    assert "the results of OpenAI batch lines are JSON lines" in capsys.readouterr().err
    assert export("e.jsonl") == 0
    assert (tmp_path / "e.jsonl").read_bytes() == whole


def test_nothing_is_overwritten_unless_asked(tmp_path, run, export, capsys):
    run(ROWS)
    assert export("in.jsonl") == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert export("out.jsonl", "--overwrite") == 2
    assert "are the same file" in capsys.readouterr().err
    assert export("e.csv") == export("e.csv", "--overwrite") == 0
    assert export("f.csv", output="nothing") == 2
    assert "no job wrote this file" in capsys.readouterr().err
