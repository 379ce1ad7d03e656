"""What the commands end with, and the line that says why."""

from __future__ import annotations

import sys

DONE, FAILED, REFUSED, ROWS_FAILED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def complain(problem: BaseException | str, code: int) -> int:
    print(f"pagedllm: error: {problem}", file=sys.stderr)
    return code
