"""The progress bar of a call: on stderr only, after a second, and only where somebody looks at it.

Processed prompts: 412/1000 [00:31<00:44, 13.3 it/s, in 2,140 toks/s, out 1,310 toks/s, cut 3 %]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

FORMAT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
DELAY_SECONDS = 1.0


class Bar:
    """Counts what is finished. is_shown: False does nothing; make: a callable like `tqdm.tqdm`, with its own looks."""

    def __init__(
        self, total: int | None, description: str, *, is_shown: bool, make: Callable[..., Any] | None = None
    ) -> None:
        self._bar: Any = None
        self._start = time.perf_counter()
        self._num_finished = 0
        self._has_our_looks = make is None
        if make is not None:
            self._bar = make(total=total, desc=description)
        elif is_shown and total != 0:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=description, file=sys.stderr, delay=DELAY_SECONDS, unit=" it", bar_format=FORMAT
            )

    def show(
        self,
        num_finished: int,
        num_input_tokens: int,
        num_output_tokens: int,
        num_cut: int,
        seconds_left: Callable[[], float | None],
    ) -> None:
        """The numbers are totals so far; seconds_left: asked only when something is drawn."""
        num_new = num_finished - self._num_finished
        if self._bar is None or not num_new:
            return
        self._num_finished = num_finished
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"in {num_input_tokens / seconds:,.0f} toks/s, out {num_output_tokens / seconds:,.0f} toks/s, "
            f"cut {100 * num_cut / num_finished:.0f} %",
            refresh=False,
        )
        left = seconds_left() if self._has_our_looks else None
        if left is not None:
            self._bar.bar_format = FORMAT.replace("{remaining}", self._bar.format_interval(left))
        self._bar.update(num_new)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def is_watched() -> bool:
    """stderr is a terminal, or this is a notebook: a process may have imported its kernel and not run it."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    is_notebook: bool = kernel is not None and kernel.IPKernelApp.initialized()
    return is_notebook or (sys.stderr is not None and sys.stderr.isatty())
