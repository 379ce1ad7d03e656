"""One stage in a process of its own: python -m tests.device.run_stage NAME ROWS SECONDS [--rehearse]"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.device.results import Budget, Results
from tests.device.target import CudaTarget, RehearsalTarget

STAGES = {
    "environment": ("environment", "run"),
    "operators": ("operators", "run"),
    "sanitizer": ("operators", "run_sanitizer"),
    "exactness": ("exactness", "run"),
    "kernels": ("kernels", "run"),
    "steps": ("steps", "run"),
    "throughput": ("throughput", "run"),
}


def main(name: str, rows: str, seconds: str, *options: str) -> None:
    budget = Budget(float(seconds))
    target = RehearsalTarget() if "--rehearse" in options else CudaTarget()
    module, function = STAGES[name]
    run = getattr(importlib.import_module(f"tests.device.{module}"), function)
    run(target, Results(name, Path(rows), target.is_rehearsal), budget)


if __name__ == "__main__":
    main(*sys.argv[1:])
