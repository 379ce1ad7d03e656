"""Runs test files again under each other instruction set that this CPU has; one process can load only one."""

from __future__ import annotations

import os
import subprocess
import sys

from pagedllm.ops.library import INSTRUCTION_SETS, choose, cpu_flags

IS_CHILD = "PAGEDLLM_TEST_OTHER_INSTRUCTION_SET"


def run_on_every_instruction_set(*test_files: str, keyword: str = "") -> None:
    """Fails with the child's output where a test fails. `keyword` chooses tests, as pytest's -k does."""
    if os.environ.get(IS_CHILD):
        return
    flags = cpu_flags()
    loaded = choose("auto", flags, os.environ.get("PAGEDLLM_KERNELS"))
    for name, needed in INSTRUCTION_SETS.items():
        if name == loaded or not needed <= flags:
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test_files]
        environment = {**os.environ, "PAGEDLLM_KERNELS": name, IS_CHILD: "1"}
        result = subprocess.run(
            [*command, "-k", keyword] if keyword else command, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"under {name}:\n{result.stdout}\n{result.stderr}"
