"""What setup.py builds, and what it says where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simt.emulator import ROOT


def run_setup(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--dry-run"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_an_unknown_kind_is_refused_by_name() -> None:
    result = run_setup(PAGEDLLM_BUILD="cpu,gpu")
    assert result.returncode != 0
    assert "error: PAGEDLLM_BUILD must list cpu, cuda or simt, got 'gpu'" in result.stderr


def test_cuda_on_request_without_nvcc_is_an_error(tmp_path: Path) -> None:
    result = run_setup(PAGEDLLM_BUILD="cuda", PATH=str(tmp_path), CUDA_HOME="", CUDA_PATH="")
    assert result.returncode != 0
    assert (
        "error: PAGEDLLM_BUILD asks for cuda, but nvcc was not found by CUDA_HOME, PATH or in the pip" in result.stderr
    )
