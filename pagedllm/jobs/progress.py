"""What a job tells while it runs and at its end, on stderr: a bar where somebody looks, else a line now and then."""

from __future__ import annotations

import sys
import time

from pagedllm.jobs.plan import JobPlan, duration
from pagedllm.jobs.report import JobReport
from pagedllm.progress import Bar, is_watched

LINE_SECONDS = 30.0


class JobProgress:
    """num_rows: None where it is not known (a pipe)."""

    def __init__(self, num_rows: int | None, is_quiet: bool) -> None:
        self._num_rows = num_rows
        self._bar = Bar(num_rows, "Processed prompts", is_shown=not is_quiet and is_watched())
        self._tells_lines = not is_quiet and not is_watched()
        self._last_line = time.monotonic()

    def tell_plan(self, plan: JobPlan) -> None:
        print(plan.text(), file=sys.stderr)

    def show(self, report: JobReport) -> None:
        def seconds_left() -> float | None:
            return report.seconds_left(self._num_rows)

        self._bar.show(
            report.num_rows, report.num_prompt_tokens, report.num_completion_tokens, report.num_cut, seconds_left
        )
        if self._tells_lines and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            total = "" if self._num_rows is None else f" of {self._num_rows:,}"
            left = seconds_left()
            print(
                f"pagedllm: {report.num_rows:,}{total} rows, {report.num_failed:,} failed, {report.num_cut:,} cut, "
                f"in {_rate(report.num_prompt_tokens, report)}, out {_rate(report.num_completion_tokens, report)}"
                f"{'' if left is None else f', {duration(left)} left'}",
                file=sys.stderr,
            )

    def close(self) -> None:
        self._bar.close()


def summary(report: JobReport) -> str:
    """The lines at the end of a run."""
    cached = 100 * report.num_cached_tokens / max(1, report.num_prompt_tokens)
    mib = report.peak_num_blocks * report.bytes_per_block / (1 << 20)
    lines = [
        f"rows         {report.num_rows:,}: {report.num_failed:,} failed, {report.num_cut:,} cut by a length",
        f"time         {report.seconds:,.1f} s without loading",
        f"tokens       in {report.num_prompt_tokens:,} ({_rate(report.num_prompt_tokens, report)}), "
        f"out {report.num_completion_tokens:,} ({_rate(report.num_completion_tokens, report)})",
        f"prefix hits  {cached:.0f} % of the input tokens",
        f"KV cache     peak {report.peak_num_blocks:,} of {report.num_blocks:,} blocks of {report.block_size} tokens "
        f"({mib:,.1f} MiB)",
        f"preemptions  {report.num_preemptions:,}",
        f"deterministic {'yes: the same rows give the same tokens' if report.deterministic else 'no'}",
    ]
    for number, limit in enumerate(report.limits()):
        lines.append(f"{'' if number else 'limited by':<12} {limit}")
    if report.first_error:
        lines.append(f"first error  {report.first_error}")
    return "\n".join(lines)


def _rate(num_tokens: int, report: JobReport) -> str:
    return f"{num_tokens / max(report.seconds, 1e-9):,.0f} tokens/s"
