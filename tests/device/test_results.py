"""What rows say, what becomes of a stage that dies, and the one line about what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedllm.model.registry import read_model_config
from pagedllm.ops.library import CPU_ONLY_OPERATORS, defined_schemas
from tests.device import main
from tests.device.models import RandomCheckpoint
from tests.device.operators import FILES, SMALL
from tests.device.results import DECODE_ATTENTION, IDLE, Budget, Results, Row, line, read_rows, summary
from tests.device.sizes import EIGHT_B, ONE_B, SMOLLM2, Shape
from tests.device.steps import num_model_bytes, step_parts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "device" / "run.sh"


def test_a_figure_is_judged_by_its_target_but_not_in_a_rehearsal(tmp_path: Path) -> None:
    for is_rehearsal, verdicts in ((False, ["met", "missed", "met", "missed"]), (True, ["figure"] * 4)):
        path = tmp_path / f"{is_rehearsal}.jsonl"
        results = Results("kernels", path, is_rehearsal)
        for value, aim in ((80, DECODE_ATTENTION), (79.9, DECODE_ATTENTION), (0.3, IDLE), (0.31, IDLE)):
            results.figure("a kernel", value, aim.unit, aim)
        rows = read_rows(path)
        assert [row.verdict for row in rows] == verdicts
        assert [row.target for row in rows] == [">= 80 % of copy"] * 2 + ["<= 0.3 ms"] * 2
        assert all(("not a GPU" in row.note) is is_rehearsal for row in rows)


def test_a_check_that_raises_has_failed_and_the_next_one_is_made(tmp_path: Path) -> None:
    results = Results("exactness", tmp_path / "rows", False)
    with results.check("one"):
        raise ValueError("a first line\nand more")
    with results.check("two") as notes:
        notes.say("seven of seven")
    assert read_rows(tmp_path / "rows") == [
        Row("exactness", "one", "FAIL", note="ValueError: a first line"),
        Row("exactness", "two", "pass", note="seven of seven"),
    ]


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    results = Results("steps", tmp_path / "rows", False)
    budget = Budget(5)
    assert budget.allows(results, "short", 4)
    assert not budget.allows(results, "long", 60)
    (row,) = read_rows(tmp_path / "rows")
    assert (row.name, row.verdict) == ("long", "cut")
    assert row.note.startswith("takes about 60 s, 5 s are left")


def test_rows_of_a_stage_that_was_killed_while_it_wrote_are_kept(tmp_path: Path) -> None:
    results = Results("steps", tmp_path / "rows", False)
    results.fact("a", "b")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"stage": "steps", "na')
    assert read_rows(tmp_path / "rows") == [Row("steps", "a", "figure", note="b")]
    assert read_rows(tmp_path / "nothing") == []


def test_a_row_is_a_line_and_rows_have_a_summary() -> None:
    row = Row("kernels", "decode", "missed", 71.25, "% of copy", ">= 80 % of copy", "3,100 GB/s")
    assert line(row) == "missed kernels     decode  71.2 % of copy  [>= 80 % of copy]  3,100 GB/s"
    assert summary([row, Row("a", "b", "pass"), Row("a", "c", "cut")]) == (
        "1 checks passed, 0 failed; targets: 0 met, 1 missed; 0 other figures and facts, 0 absent, 1 cut"
    )


def test_a_stage_that_dies_or_hangs_is_a_failed_row(tmp_path: Path) -> None:
    (row,) = main.run_stage("no such stage", 60, tmp_path, is_rehearsal=True)
    assert row.verdict == "FAIL"
    assert row.note == "ended with status 1: KeyError: 'no such stage'"
    begin = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        assert main.run_limited([sys.executable, "-c", "import time; time.sleep(600)"], 0.5, log) is None
    assert time.monotonic() - begin < 200
    (row,) = main.run_stage("kernels", 4, tmp_path, is_rehearsal=True)
    assert (row.verdict, row.note) == ("cut", "no time is left")


def test_nothing_is_run_where_the_library_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_stage(name: str, limit: float, folder: Path, is_rehearsal: bool) -> list[Row]:
        assert name == "environment"
        return [Row(name, "the library fits this torch", "FAIL", note="built for another")]

    monkeypatch.setattr(main, "run_stage", run_stage)
    assert main.main(["--rehearse", "--json", str(tmp_path / "results.json")]) == 1
    value = json.loads((tmp_path / "results.json").read_text())
    assert [row["verdict"] for row in value["rows"]] == ["FAIL"] + ["cut"] * 6
    assert "built for another" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PYTHON": "/nowhere/python"}, "run.sh: /nowhere/python is not found: set PYTHON to an interpreter"),
        ({"PYTHON": sys.executable}, "run.sh: "),
    ],
    ids=["python", "GPU or library"],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, environment: dict[str, str], message: str) -> None:
    command = [SCRIPT, "--json", str(tmp_path / "results.json")]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("tests", [FILES, SMALL], ids=["wide", "small"])
def test_every_cuda_operator_is_run_on_the_gpu(tests: list[str]) -> None:
    """Its call stands in one of the files that stages 2 and 3 run."""
    files = {ROOT / test.partition("::")[0] for test in tests} | {ROOT / "tests" / "simt" / "attention_case.py"}
    text = "".join(path.read_text() for path in files)
    names = {schema[: schema.index("(")] for schema in defined_schemas()} - CPU_ONLY_OPERATORS
    calls = {name: "attend" if name == "paged_attention" else name for name in names}
    assert sorted(name for name, call in calls.items() if f"{call}(" not in text) == []


@pytest.mark.parametrize(("shape", "billions"), [(SMOLLM2, 0.1345), (ONE_B, 1.236), (EIGHT_B, 8.030)])
def test_the_shapes_are_those_of_the_models(shape: Shape, billions: float) -> None:
    assert num_model_bytes(shape) / 2e9 == pytest.approx(billions, rel=0.001)


def test_a_steps_floor_counts_weights_and_keys_once() -> None:
    config = read_model_config(RandomCheckpoint(EIGHT_B).config, Path("8B"))
    parts = list(step_parts(config, 64, 1000))
    weights = num_model_bytes(EIGHT_B) - 2 * EIGHT_B.vocab_size * EIGHT_B.hidden_size  # the embedding's are not read
    keys = 64 * 1000 * 2 * 32 * 8 * 128 * 2
    total = sum(part.num_bytes for part in parts)
    assert weights + keys < total < 1.04 * (weights + keys)  # activations are the rest
    products = 64 * (weights / 2) * 2
    attention = 4 * 64 * 1000 * 32 * 32 * 128
    assert sum(part.flops for part in parts) == pytest.approx(products + attention)
