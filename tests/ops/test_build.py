"""setup.py: what it compiles again, and what it says when it cannot compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def build(folder: Path, **environment: str) -> list[str]:
    """Builds in place; returns the names that were built, with their folders."""
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("building ")]
    return sorted(line.removeprefix("building build/kernels/") for line in lines)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with our setup.py, one kernel with a header and one binding."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for folder in ("pagedllm", "csrc/cpu", "csrc/bindings"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pagedllm/__init__.py").touch()
    (tmp_path / "csrc/cpu/answer.h").write_text("int answer();\n")
    (tmp_path / "csrc/cpu/answer.cpp").write_text('#include "cpu/answer.h"\nint answer() { return 42; }\n')
    (tmp_path / "csrc/bindings/ask.cpp").write_text("int answer();\nint ask() { return answer(); }\n")
    return tmp_path


def test_only_what_changed_is_compiled_again(tree: Path) -> None:
    first = build(tree)
    libraries = [name for name in first if name.endswith(".so")]
    kernels = [name for name in first if name.endswith("answer.o")]
    assert "libpagedllm_cpu_generic.so" in libraries
    assert len(kernels) == len(libraries)
    assert sorted(first) == sorted([*libraries, *kernels, "bindings/ask.o"])
    assert sorted(path.name for path in (tree / "pagedllm/lib").iterdir()) == libraries
    assert build(tree) == []

    os.utime(tree / "csrc/cpu/answer.h")  # a header that only the kernels include
    assert build(tree) == sorted([*libraries, *kernels])

    (tree / "csrc/cpu/more.cpp").write_text("int more() { return 43; }\n")  # found, not listed anywhere
    assert build(tree) == sorted([*libraries, *(name.replace("answer", "more") for name in kernels)])

    (tree / "csrc/cpu/more.cpp").unlink()
    assert build(tree) == libraries


def test_a_missing_compiler_is_one_line_that_says_what_to_install(tree: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: the C++ compiler 'no-such-compiler' was not found: install it (Debian, Ubuntu: apt install g++; "
    )
    assert "Traceback" not in result.stderr


def test_what_the_compiler_says_is_shown(tree: Path) -> None:
    (tree / "csrc/cpu/answer.cpp").write_text("int answer() { return forty_two; }\n")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "csrc/cpu/answer.cpp:1:" in result.stderr
    assert "‘forty_two’ was not declared" in result.stderr or "'forty_two'" in result.stderr
