"""What the commands end with, and the line that says why."""

from __future__ import annotations

import sys

DONE, FAILED, REFUSED, ROWS_FAILED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def complain(problem: BaseException | str, code: int) -> int:
    """An error of the system is told as other commands do: the file, then what is wrong with it."""
    if isinstance(problem, OSError) and problem.strerror is not None:
        file = "" if problem.filename is None else f"{problem.filename}: "
        problem = f"{file}{problem.strerror}"
    print(f"pagedllm: error: {problem}", file=sys.stderr)
    return code
