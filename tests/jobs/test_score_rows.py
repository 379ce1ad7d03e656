"""The task loglikelihood over files: the scores that LLM.loglikelihood gives, in every kind of file, and continued."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedllm import LLM
from pagedllm.jobs.score_rows import SCORE_COLUMNS
from pagedllm.outputs import RESULT_COLUMNS
from tests.tiny import save_tiny_model

ROWS: list[dict[str, Any]] = [
    {"id": 1, "prompt": "the quick ", "continuation": "brown fox"},
    {"id": 2, "prompt": "the quick ", "continuation": "lazy dog"},
    {"id": 3, "messages": [{"role": "user", "content": "one two"}], "continuation": " three"},
    {"id": 4, "prompt": "", "continuation": "seven"},
    {"id": 5, "prompt": "the quick ", "continuation": "brown fox"},
]
COLUMNS = [*RESULT_COLUMNS[:-1], *SCORE_COLUMNS, RESULT_COLUMNS[-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("scores") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[dict[str, Any]]:
    """The score columns of ROWS."""
    prompts = [{k: row[k] for k in ("prompt", "messages") if k in row} for row in ROWS]
    scores = llm.loglikelihood(prompts, [row["continuation"] for row in ROWS], use_tqdm=False)
    return [
        {
            "logprob": score.logprob,  # type: ignore[union-attr]
            "is_greedy": score.is_greedy,  # type: ignore[union-attr]
            "token_ids": score.token_ids,  # type: ignore[union-attr]
            "token_logprobs": score.token_logprobs.tolist(),  # type: ignore[union-attr]
        }
        for score in scores
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in SCORE_COLUMNS}


def test_rows_get_the_scores_of_the_call(llm: LLM, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    report = llm.run_file(write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", task="loglikelihood")
    rows = read(tmp_path / "out.jsonl")
    for index, (row, given, score) in enumerate(zip(rows, ROWS, expected, strict=True)):
        assert list(row) == [*given, *COLUMNS]
        assert {name: row[name] for name in given} == given
        assert scores_of(row) == score
        assert (row["output"], row["finish_reason"], row["stop_reason"], row["error"]) == ("", "stop", "", "")
        assert row["completion_tokens"] == len(score["token_ids"])
        assert row["row"] == index
    assert [row["prompt_tokens"] for row in rows][3] == 1  # the BOS token
    assert (report.num_rows, report.num_failed, report.num_cut, report.num_equal) == (5, 0, 0, 1)


def test_a_stream_gets_the_same_lines(llm: LLM, folder: Path, tmp_path: Path) -> None:
    llm.run_file(write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", task="loglikelihood")
    command = [sys.executable, "-m", "pagedllm", "run", "-q", "-m", str(folder), "-i", str(tmp_path / "in.jsonl")]
    command += ["-o", "-", "--task", "loglikelihood", "--dtype", "float32", "--max-model-len", "128"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == (tmp_path / "out.jsonl").read_text()


def test_bad_rows_cost_themselves_only(llm: LLM, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ({"prompt": "a"}, "invalid_parameter: continuation must be a text that is not empty: the row has none"),
        ({"prompt": "a", "continuation": ""}, "continuation must be a text that is not empty: got '' (str)"),
        ({"prompt": "a", "continuation": 5}, "continuation must be a text that is not empty: got 5 (int)"),
        ({"continuation": "b"}, "the row has neither 'prompt' nor 'messages'"),
        ({"prompt": "a ", "continuation": "b" * 200}, "prompt_too_long: continuation with its prompt: "),
        ({"prompt": "a", "continuation": "b", "sampling_params": {"n": 1}}, "sampling parameters mean nothing to the"),
        ([1], "invalid_json_line: a row must be a JSON object"),
    ]
    rows = [ROWS[0], *(row for row, _ in bad), ROWS[1]]
    report = llm.run_file(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", task="loglikelihood")
    found = read(tmp_path / "out.jsonl")
    assert [scores_of(found[0]), scores_of(found[-1])] == expected[:2]
    for row, (_, text) in zip(found[1:-1], bad, strict=True):
        assert text in row["error"]
        assert scores_of(row) == {"logprob": None, "is_greedy": None, "token_ids": [], "token_logprobs": []}
        assert (row["output"], row["finish_reason"], row["completion_tokens"]) == (None, "error", 0)
    assert report.num_failed == len(bad)


def test_a_finished_file_takes_new_rows_and_an_equal_text_of_another_seam_is_another_row(
    llm: LLM, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    llm.run_file(write(source, ROWS[:2]), out, task="loglikelihood")
    more = [*ROWS[:2], {"prompt": "the quick brown", "continuation": " fox"}, ROWS[3]]
    before = llm.stats.num_prompt_tokens
    report = llm.run_file(write(source, more), out, task="loglikelihood")
    assert report.num_resumed == 2
    assert llm.stats.num_prompt_tokens > before
    rows = read(out)
    assert [scores_of(rows[0]), scores_of(rows[1]), scores_of(rows[3])] == [*expected[:2], expected[3]]
    assert rows[2]["token_ids"] == rows[0]["token_ids"][-1:]
    with pytest.raises(ValueError, match="run with another task: 'loglikelihood' -> 'generate'"):
        llm.run_file(source, out, sampling_params={"max_tokens": 2})


def test_tables_keep_the_types_of_scores(llm: LLM, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"id": 6, "prompt": "a", "continuation": "b" * 200}]
    source = write(tmp_path / "in.jsonl", rows)
    llm.run_file(source, tmp_path / "out.csv", task="loglikelihood")
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as stream:
        records = list(csv.DictReader(stream))
    assert [float(record["logprob"]) for record in records[:2]] == [score["logprob"] for score in expected[:2]]
    assert [json.loads(record["token_ids"]) for record in records[:2]] == [s["token_ids"] for s in expected[:2]]
    assert (records[2]["logprob"], records[2]["token_ids"]) == ("", "[]")
    write(source, [*rows, ROWS[3]])
    assert llm.run_file(source, tmp_path / "out.csv", task="loglikelihood").num_resumed == 3
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    llm.run_file(source, tmp_path / "out.parquet", task="loglikelihood")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.field("logprob").type == pyarrow.float64()
    assert table.schema.field("is_greedy").type == pyarrow.bool_()
    assert table.column("logprob").to_pylist() == [*(s["logprob"] for s in expected[:2]), None, expected[3]["logprob"]]
    assert table.column("token_logprobs").to_pylist()[0] == expected[0]["token_logprobs"]


def test_what_means_nothing_to_scores_is_refused_before_any_work(llm: LLM, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"sampling parameters mean nothing to the task.*: got temperature"):
        llm.run_file(source, out, task="loglikelihood", sampling_params={"temperature": 0})
    with pytest.raises(ValueError, match="task must be one of 'generate', 'loglikelihood', got 'score'"):
        llm.run_file(source, out, task="score")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scores the column 'continuation': the columns are prompt, text"):
        llm.run_file(write(source, [{"prompt": "a", "text": "b"}]), out, task="loglikelihood")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
    with pytest.raises(ValueError, match="task='loglikelihood' is for plain rows"):
        llm.run_file(write(source, [{**line, "continuation": "b"}]), out, task="loglikelihood")
    assert not out.exists()


def test_choices_come_by_flag_and_by_row(llm: LLM, folder: Path, tmp_path: Path) -> None:
    own = {"structured_outputs": {"choice": ["ünï", "x, y"]}, "seed": 1}
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "sampling_params": own}]
    wrong = {"prompt": "c", "sampling_params": {"structured_outputs": {"choice": []}}}
    source = write(tmp_path / "in.jsonl", [*rows, wrong])
    command = [sys.executable, "-m", "pagedllm", "run", "-q", "-m", str(folder), "-i", str(source), "-o", "-"]
    command += ["--choice", "yes,no", "--max-model-len", "128", "--max-failed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {found[0]["output"], found[1]["output"]} <= {"yes", "no"}
    assert found[2]["output"] in ("ünï", "x, y")
    assert [row["finish_reason"] for row in found] == ["stop", "stop", "stop", "error"]
    assert "structured_outputs.choice must be a non-empty list" in found[3]["error"]
    llm.run_file(source, tmp_path / "out.jsonl", sampling_params={"structured_outputs": {"choice": ["yes", "no"]}})
    assert {row["output"] for row in read(tmp_path / "out.jsonl")[:2]} <= {"yes", "no"}


def test_logprobs_of_tokens_that_cannot_come_are_null_in_files(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with LLM(folder, dtype="float32", max_model_len=64, logprobs_mode="processed_logprobs", num_threads=1) as llm:
        params = {"logprobs": 3, "top_k": 1, "max_tokens": 2, "ignore_eos": True}
        llm.run_file(source, tmp_path / "out.jsonl", sampling_params=params)

    def refuse(text: str) -> float:
        raise AssertionError(text)

    (row,) = [json.loads(text, parse_constant=refuse) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [value for value in row["token_logprobs"] if not math.isclose(value, 0, abs_tol=1e-6)] == []
    assert sum(entry["logprob"] is None for entry in row["top_logprobs"][0]) == 2
