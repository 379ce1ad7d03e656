"""What setup.py builds, and what it says where it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedllm.errors import LibraryError
from pagedllm.ops.library import load_library
from tests.simt.emulator import ROOT
from tests.simt.nvcc import NO_NVCC, find_tool


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


@pytest.mark.slow
@pytest.mark.skipif(find_tool("nvcc") is None, reason=NO_NVCC)
def test_the_cuda_library_names_both_halves_of_torch(tmp_path: Path) -> None:
    """Or else the loader would not look for the CUDA half's symbols there. A torch without it says what is wanted."""
    environment = os.environ | {"PAGEDLLM_BUILD": "cuda", "PAGEDLLM_CUDA_ARCHS": "90"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    library = tmp_path / "pagedllm" / "lib" / "libpagedllm_cuda.so"
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listed)
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
    assert not any(name.startswith("libcuda") for name in needed), "the runtime is linked in"
    if torch.version.cuda is None:
        with pytest.raises(LibraryError, match=r"do not load into torch .*libtorch_cuda.so"):
            load_library(library)
