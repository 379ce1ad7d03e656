"""Every stage of tests/device/run.sh, on the emulated kernels: what is run on a GPU is run here, but for the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.main import STAGES

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {">= 80 % of copy", ">= 300 TFLOP/s", "<= 1.6 x floor", "<= 0.3 ms"}


@pytest.mark.timeout(1800)  # on a busy machine
def test_the_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    command = [ROOT / "tests/device/run.sh", "--rehearse", "--minutes", "30"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    value = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = value["rows"]
    assert [row for row in rows if row["verdict"] in ("FAIL", "cut", "met", "missed")] == []
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert value["kind"] == "rehearsal, not a GPU"
    assert list(value["seconds"]) == [stage.name for stage in STAGES]
    assert {row["target"] for row in rows if row["target"]} == TARGETS
    assert all("not a GPU" in row["note"] for row in rows if row["value"] is not None)
    assert "This was a rehearsal, not a GPU" in result.stdout
    logs = {f"{stage.name}.log" for stage in STAGES}
    assert {path.name for path in (tmp_path / "out").iterdir()} == logs | {"results.json"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_operator_tests_run_by_the_way_that_leads_to_a_gpu() -> None:
    from tests.device.operators import FILES, PYTEST

    command = [*PYTEST, *FILES, "--operators-on", "copies"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
