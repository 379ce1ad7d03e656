"""`import pagedllm` is light, and its door holds what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pagedllm

HEAVY = ["torch", "numpy", "transformers", "tokenizers", "safetensors", "tqdm", "jinja2"]


def loaded_after(statement: str) -> str:
    script = f"import sys\n{statement}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    assert loaded_after("import pagedllm") == "[]"


def test_params_outputs_and_errors_import_nothing_heavy():
    assert loaded_after("from pagedllm import SamplingParams, RequestOutput, RequestError; SamplingParams()") == "[]"


def test_the_llm_class_imports_no_torch():
    assert "torch" not in loaded_after("from pagedllm import LLM")


def test_all_is_sorted_and_every_name_loads():
    assert pagedllm.__all__ == sorted(pagedllm.__all__, key=lambda name: (name != "LLM", name))
    for name in pagedllm.__all__:
        assert getattr(pagedllm, name) is not None


def test_import_takes_at_most_a_fifth_of_a_second():
    script = "import time; start = time.perf_counter(); import pagedllm; print(time.perf_counter() - start)"
    times = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout) for _ in range(5)
    ]
    assert min(times) <= 0.2


def test_installing_replaces_no_torch_and_compiles_nothing_at_run_time():
    from importlib.metadata import requires

    needed = [line for line in requires("pagedllm") or [] if line.startswith("torch") and "extra" not in line]
    assert needed == ["torch>=2.10"]
    assert "cpp_extension" not in "".join(path.read_text() for path in Path(pagedllm.__file__).parent.rglob("*.py"))
