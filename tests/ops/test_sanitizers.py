"""The operators' tests again on kernels built with AddressSanitizer and UBSan: no access outside a tensor, no undefined
behaviour, on each instruction set that this CPU has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedllm.ops.library import INSTRUCTION_SETS, cpu_flags
from tests.ops.isa import IS_CHILD

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SANITIZED_CXX = "g++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
# first in the process, before Python: ASan replaces malloc, and needs libstdc++ for its own view of exceptions
PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so.6")


def run(command: list[str], folder: Path, **environment: str) -> None:
    """Runs a command in the copy; fails with its output."""
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"


@pytest.fixture(scope="module")
def sanitized_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with libraries of its own."""
    copy = tmp_path_factory.mktemp("sanitized")
    for name in ("csrc", "pagedllm", "tests"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    run([sys.executable, "setup.py", "build_ext", "--inplace"], copy, CXX=SANITIZED_CXX)
    return copy


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, needed in INSTRUCTION_SETS.items() if needed <= cpu_flags()])
def test_kernels_stay_within_their_tensors(sanitized_copy: Path, name: str) -> None:
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for library in PRELOADED
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "tests/ops",
    ]  # -s: the report
    run(
        [*command, "-k", "not opcheck and not libraries_that_do_not_fit and not test_build"],
        sanitized_copy,
        LD_PRELOAD=":".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter's own
        PAGEDLLM_KERNELS=name,
        PYTHONPATH=str(sanitized_copy),
        **{IS_CHILD: "1"},
    )
