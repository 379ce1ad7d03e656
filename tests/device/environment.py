"""Stage 1: what card, driver, torch and library this is, and what doctor says. Where they do not fit each other,
nothing else is run."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from pagedllm import doctor
from pagedllm.runtime.compute_device import load_kernels_of
from tests.device.results import ESSENTIAL, Budget, Results
from tests.device.target import Target


def run(target: Target, results: Results, budget: Budget) -> None:
    results.fact("versions", f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}")
    with results.check(f"{ESSENTIAL} this torch") as notes:
        notes.say(str(target.load()))
    with results.check(f"{ESSENTIAL} this card") as notes:
        notes.say(target.card())
        load_kernels_of(target.gpu(), target.settings.get("kernels", "auto"))  # runs one: is there code for this card?
    for finding in doctor.examine():
        name = f"doctor: {finding.what}"
        if finding.verdict == "fail":
            results.failed(name, f"{finding.value} {finding.advice}".strip())
        else:
            results.fact(name, f"{finding.verdict}: {finding.value}")


def commit() -> str:
    """Of the repository; where it was copied without its history, what PAGEDLLM_COMMIT says."""
    command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        found = None
    if found is not None and found.returncode == 0:
        return found.stdout.strip()
    return os.environ.get("PAGEDLLM_COMMIT", "unknown")
