"""Stage 1: what card, driver, torch and library this is, and what doctor says. Where they do not fit each other,
nothing else is run."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from pagedllm import doctor
from pagedllm.ops.norm import rms_norm
from tests.device.results import ESSENTIAL, Budget, Results
from tests.device.target import Target


def run(target: Target, results: Results, budget: Budget) -> None:
    results.fact("versions", f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}")
    with results.check(f"{ESSENTIAL} this torch") as notes:
        notes.say(str(target.load()))
    with results.check(f"{ESSENTIAL} this card") as notes:
        notes.say(target.card())
        run_a_kernel(target)
    for finding in doctor.examine():
        name = f"doctor: {finding.what}"
        if finding.verdict == "fail":
            results.failed(name, f"{finding.value} {finding.advice}".strip())
        else:
            results.fact(name, f"{finding.verdict}: {finding.value}")


def run_a_kernel(target: Target) -> None:
    """The first one that is run says whether there is code for this architecture."""
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=target.device)
    out = torch.zeros_like(x)
    try:
        rms_norm(target.namespace, out, x, torch.ones(64, dtype=torch.float32, device=target.device), 0.0)
        target.synchronize()
    except RuntimeError as error:
        if "no kernel image" not in str(error) and "unsupported toolchain" not in str(error):
            raise
        raise RuntimeError(
            f"the library has no code for this card ({target.card()}): build it with PAGEDLLM_CUDA_ARCHS set to its "
            f"architecture ({str(error).splitlines()[0]})"
        ) from error
    assert torch.equal(out.cpu(), torch.ones(2, 64, dtype=torch.bfloat16)), f"the norm of ones is {out.cpu()[0, :4]}"


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
