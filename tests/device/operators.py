"""Stages 2 and 3: the operators' own tests on this device, each call twice with equal bits; then some of them under
compute-sanitizer. In a rehearsal the emulator's checking build stands for that."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.device.results import Budget, Results
from tests.device.target import Target

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("attention", "shared_prefix", "kv_write", "rows", "grouped_dense", "sampling", "large_batches")
FILES = [f"tests/simt/test_{name}.py" for name in NAMES]
SMALL = [
    "tests/simt/test_attention.py::test_each_head_dim_and_type_in_items_of_every_height",
    "tests/simt/test_attention.py::test_blocks_that_a_window_has_left_behind_may_hold_anything",
    "tests/simt/test_shared_prefix.py::test_what_is_shared_need_not_lie_side_by_side_in_the_batch",
    "tests/simt/test_kv_write.py::test_q_k_and_v_are_as_the_twin_has_them",
    "tests/simt/test_rows.py::test_add_rms_norm_rounds_the_residual_once_and_norms_that",
    "tests/simt/test_rows.py::test_layer_norm_is_as_exact_as_torch",
    "tests/simt/test_rows.py::test_gated_activation_is_as_exact_as_torch",
    "tests/simt/test_rows.py::test_ungated_activation_is_as_exact_as_torch",
    "tests/simt/test_rows.py::test_gather_rows_copies_bits",
    "tests/simt/test_rows.py::test_copy_blocks_copies_bits_and_leaves_the_rest",
    "tests/simt/test_grouped_dense.py::test_a_row_has_the_same_bits_however_many_its_expert_has",
    "tests/simt/test_sampling.py::test_greedy_takes_the_lowest_id_of_equal_logits",
    "tests/simt/test_sampling.py::test_random_settings_draw_as_the_twin",
    "tests/simt/test_sampling.py::test_edits_of_logits_equal_the_twins",
    "tests/simt/test_sampling.py::test_top_logprobs_have_the_twins_ids_and_ranks",
]
REHEARSED = "left_behind or side_by_side or copies_bits or lowest_id or edits"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REASON = r"^(?:FAILED|ERROR) .*|^========= (?:Error|Invalid|Uninitialized|Race|Barrier).*"
FOUND = 66  # compute-sanitizer's exit status where it found something
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rfE", "--tb=short"]


def run(target: Target, results: Results, budget: Budget) -> None:
    tests = [*SMALL, "-k", REHEARSED] if target.is_rehearsal else FILES
    with results.check("operators against twins and float64, each call twice") as notes:
        notes.say(pytest_words([*PYTEST, *tests, "--operators-on", target.operators_on], budget.left))


def run_sanitizer(target: Target, results: Results, budget: Budget) -> None:
    small = [*PYTEST, *SMALL, "--operators-on", target.operators_on]
    if target.is_rehearsal:
        with results.check("the emulator's checking build in the sanitizer's place") as notes:
            notes.say(pytest_words([*small, "-k", "copies_bits"], budget.left))
        return
    sanitizer = find_sanitizer()
    if sanitizer is None:
        results.absent("compute-sanitizer", "not found on PATH, in CUDA_HOME or in /usr/local/cuda")
        return

    def check(tool: str) -> None:
        with results.check(f"compute-sanitizer {tool}") as notes:
            options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
            if tool == "memcheck":
                options += ["--report-api-errors", "no"]  # torch asks for driver functions that need not be there
            # each tensor an allocation of its own, so that a step beyond it is seen
            environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            notes.say(pytest_words([sanitizer, *options, *small], budget.left, environment))

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        list(pool.map(check, TOOLS))


def find_sanitizer() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)] + ["/usr/local/cuda"]
    places = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)])
    return shutil.which("compute-sanitizer", path=places)


def pytest_words(command: list[str], seconds: float, environment: dict[str, str] | None = None) -> str:
    """pytest's last line; AssertionError with the first failure's where not all passed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (environment or {}), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(max(1.0, seconds - 3))
        except subprocess.TimeoutExpired:
            process.kill()
            status = None
        output.seek(0)
        text = output.read()
    print(text, flush=True)
    summary = re.findall(r"^=*\s*(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s)", text, re.MULTILINE)
    last = summary[-1] if summary else "no summary"
    if status is None:
        raise AssertionError(f"not done after {seconds:.0f} s: {progress(text)}")
    reasons = re.findall(REASON, text, re.MULTILINE)
    if status != 0 or "passed" not in last:
        raise AssertionError(f"exit status {status}, {last}: {reasons[0] if reasons else progress(text)}")
    return last


def progress(text: str) -> str:
    lines = [words for words in text.splitlines() if words.strip()]
    return lines[-1][-200:] if lines else "no output"
