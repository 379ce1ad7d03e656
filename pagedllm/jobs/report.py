"""JobReport: what became of a job, so far or at its end.

Counts, histograms, a few rows by number and id; texts only where they were asked for. `log` has the course of the run,
`plan` what was expected. report_page.py makes files of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedllm.engine.run_log import Ended, RunLog, Span, Work
from pagedllm.jobs.plan import JobPlan
from pagedllm.outputs import RequestOutput

NUM_SLOWEST = 10
NUM_FAILED = 20
BINS_PER_DOUBLING = 2
MAX_TEXT = 500  # characters of an output that a report quotes


class SlowRow(NamedTuple):
    seconds: float  # from its admission to its end
    row: int
    id: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    text: str


class FailedRow(NamedTuple):
    row: int
    id: str
    code: str
    message: str  # may quote the row


class Histogram:
    """Counts of values in bins that grow by the same factor; zeros have a bin of their own."""

    def __init__(self) -> None:
        self._bins: dict[int | None, int] = {}
        self.largest = 0.0

    def add(self, value: float, number: int = 1) -> None:
        index = math.floor(math.log2(value) * BINS_PER_DOUBLING) if value > 0 else None
        self._bins[index] = self._bins.get(index, 0) + number
        self.largest = max(self.largest, value)

    def bins(self) -> list[tuple[float, float, int]]:
        """(from, to, number) of all bins between the lowest and the highest; [0, 0] first."""
        zeros = [(0.0, 0.0, self._bins[None])] if None in self._bins else []
        indices = [index for index in self._bins if index is not None]
        if not indices:
            return zeros
        return zeros + [
            (2 ** (i / BINS_PER_DOUBLING), 2 ** ((i + 1) / BINS_PER_DOUBLING), self._bins.get(i, 0))
            for i in range(min(indices), max(indices) + 1)
        ]

    def quantile(self, share: float) -> float:
        """About: the upper end of the bin that holds it."""
        left = share * sum(self._bins.values())
        for _, end, number in self.bins():
            left -= number
            if left <= 0:
                return min(end, self.largest)
        return self.largest


@dataclass(slots=True)
class JobReport:
    """Rows of earlier runs count as rows, failures and cuts; tokens, hits and seconds are this run's."""

    num_rows: int = 0
    num_resumed: int = 0  # of those, done by an earlier run
    num_equal: int = 0  # of those, answered by an equal row's result
    num_failed: int = 0
    num_cut: int = 0  # ended by a length
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    peak_num_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    bytes_per_block: int = 0
    first_error: str = ""
    is_finished: bool = False  # every row has its result
    engine: Mapping[str, Any] = field(default_factory=dict)  # as LLM.info tells
    plan: JobPlan | None = None
    log: RunLog | None = None
    prompt_lengths: Histogram = field(default_factory=Histogram)
    output_lengths: Histogram = field(default_factory=Histogram)
    latencies: Histogram = field(default_factory=Histogram)
    failed_rows: list[FailedRow] = field(default_factory=list)
    work: Work = field(default_factory=Work)  # of all windows that were planned by now
    num_known_rows: int = 0  # in them
    knows_all_rows: bool = False
    ended: Ended = field(default_factory=Ended)
    _slowest: list[SlowRow] = field(default_factory=list)  # a heap

    @property
    def deterministic(self) -> bool:
        """Whether the same rows give the same tokens, alone or in any batch."""
        return bool(self.engine.get("deterministic", False))

    def count(self, output: RequestOutput, num_rows: int = 1, row_id: str = "") -> None:
        """num_rows: how many rows of the input have this result."""
        self.num_rows += num_rows
        self.num_equal += num_rows - 1
        if output.error is not None:
            error = output.error
            self.num_failed += num_rows
            self.first_error = self.first_error or f"row {output.index}: {error.code}: {error.message}"
            if len(self.failed_rows) < NUM_FAILED:
                self.failed_rows.append(FailedRow(output.index, row_id, error.code, error.message))
            return
        outputs, metrics = output.outputs, output.metrics
        num_prompt, num_output = len(output.prompt_token_ids), sum(len(one.token_ids) for one in outputs)
        reasons = [one.finish_reason or "" for one in outputs]
        self.num_cut += num_rows if "length" in reasons else 0
        self.num_prompt_tokens += num_prompt
        self.num_completion_tokens += num_output
        self.num_cached_tokens += output.num_cached_tokens
        self.prompt_lengths.add(num_prompt, num_rows)
        self.output_lengths.add(num_output, num_rows)
        if metrics is None or self.log is None:
            return
        for completion in outputs[: metrics.num_samples]:
            self.ended.add(len(completion.token_ids), metrics.max_output_tokens, completion.finish_reason)
        seconds = self.log.seconds_since(metrics.num_steps)
        self.latencies.add(seconds, num_rows)
        text = (outputs[0].text or "")[:MAX_TEXT]
        reason = ", ".join(dict.fromkeys(reasons))
        row = SlowRow(seconds, output.index, row_id, num_prompt, num_output, reason, text)
        (heapq.heappush if len(self._slowest) < NUM_SLOWEST else heapq.heappushpop)(self._slowest, row)

    def count_resumed(self, num_rows: int, num_failed: int, num_cut: int) -> None:
        self.num_rows += num_rows
        self.num_resumed += num_rows
        self.num_failed += num_failed
        self.num_cut += num_cut

    def note_step(self, log: RunLog) -> None:
        self.seconds = log.seconds
        self.peak_num_blocks, self.num_preemptions = log.peak_num_blocks, log.num_preemptions

    def slowest_rows(self) -> list[SlowRow]:
        return sorted(self._slowest, reverse=True)

    def add_work(self, work: Work, num_rows: int, *, is_all: bool) -> None:
        """What the rows of one more window cost; num_rows: of the input that are known by now."""
        self.work = self.work + work
        self.num_known_rows, self.knows_all_rows = num_rows, is_all

    def seconds_left(self, num_rows: int | None = None) -> float | None:
        """Of this run, from now on; num_rows: of the input, while not all of them are known to the plan."""
        left = None if self.log is None else self.log.seconds_left(self.work, self.ended)
        if left is None or self.knows_all_rows:
            return left
        if num_rows is None or not self.num_known_rows:
            return None
        return (self.seconds + left) * max(num_rows, self.num_known_rows) / self.num_known_rows - self.seconds

    def limits(self) -> list[str]:
        """What limited the run, the most important first."""
        if self.log is None:
            return []
        engine = self.engine
        return self.log.limits(engine["max_num_batched_tokens"], engine["max_num_seqs"], self.num_blocks)

    def _repr_html_(self) -> str:
        """The report itself, where a notebook shows it; no texts."""
        from pagedllm.jobs.report_page import as_fragment

        return as_fragment(self)

    def to_dict(self, *, has_texts: bool = False) -> dict[str, Any]:
        """Plain values for JSON. has_texts: outputs of the slowest rows, messages of the failed ones."""
        log = self.log
        names = [name for name in self.__slots__ if name.startswith("num_") and name != "num_known_rows"]
        histograms = {"prompt_tokens": self.prompt_lengths, "output_tokens": self.output_lengths}
        histograms["seconds"] = self.latencies
        return {
            **{name: getattr(self, name) for name in names},
            "peak_num_blocks": self.peak_num_blocks,
            "seconds": self.seconds,
            "is_finished": self.is_finished,
            "deterministic": self.deterministic,
            "engine": dict(self.engine),
            "limited_by": self.limits(),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "histograms": {
                name: [{"from": begin, "to": end, "rows": number} for begin, end, number in histogram.bins()]
                for name, histogram in histograms.items()
            },
            "timeline": [] if log is None else [_span_values(span) for span in log.spans],
            "slowest_rows": [_without(row._asdict(), "text", has_texts) for row in self.slowest_rows()],
            "failed_rows": [_without(row._asdict(), "message", has_texts) for row in self.failed_rows],
        }


def _without(values: dict[str, Any], name: str, is_kept: bool) -> dict[str, Any]:
    return values if is_kept else {key: value for key, value in values.items() if key != name}


def _span_values(span: Span) -> dict[str, float]:
    return {name: getattr(span, name) for name in span.__slots__}
