"""Charts of a job as SVG texts, drawn by matplotlib (the extra `charts`).

matplotlib's settings are changed for the duration of a call only, and no pyplot: a notebook's own figures stay as they
are. Texts stay texts, so a page can be searched; ids differ from chart to chart, since they share one page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pagedllm.engine.run_log import Span
from pagedllm.jobs.report import Histogram, JobReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (7.2, 2.5)  # inches
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLORS = ("#2563a8", "#d97706", "#4d7c0f")


def has_charts() -> bool:
    """Whether the library is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw_charts(report: JobReport) -> Iterator[tuple[str, str]]:
    """(title, svg) of each chart that has something to show. Raises ImportError without matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    spans = report.log.spans if report.log is not None else []
    charts: list[tuple[str, Any]] = []
    if spans:
        charts += [
            ("Throughput", lambda axes: _throughput(axes, spans)),
            ("Requests in the engine", lambda axes: _requests(axes, spans)),
            ("KV cache in use and prefix hits", lambda axes: _cache(axes, spans, report.num_blocks)),
        ]
    for title, unit, histogram in (
        ("Prompt lengths", "tokens", report.prompt_lengths),
        ("Output lengths", "tokens", report.output_lengths),
        ("Time of a row, from its admission to its end", "seconds", report.latencies),
    ):
        if histogram.bins():
            charts.append((title, lambda axes, h=histogram, u=unit: _histogram(axes, h, u)))
    for number, (title, draw) in enumerate(charts):
        settings: Any = {**SETTINGS, "svg.hashsalt": f"pagedllm-{number}"}
        with mpl.rc_context(settings):
            figure = Figure(figsize=SIZE, layout="constrained")
            FigureCanvasSVG(figure)
            draw(figure.subplots())
            out = io.StringIO()
            no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
            figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
        svg = out.getvalue()
        yield title, re.sub(r'( id="|url\(#|href="#)', rf"\g<1>c{number}-", svg[svg.index("<svg") :])


def _throughput(axes: Axes, spans: Sequence[Span]) -> None:
    _stairs(axes, spans, [span.num_input_tokens / _seconds(span) for span in spans], "input, computed", 0)
    _stairs(axes, spans, [span.num_output_tokens / _seconds(span) for span in spans], "output", 1)
    _finish(axes, "tokens per second")


def _requests(axes: Axes, spans: Sequence[Span]) -> None:
    _stairs(axes, spans, [span.sum_running / max(1, span.num_steps) for span in spans], "running", 0)
    _stairs(axes, spans, [span.sum_waiting / max(1, span.num_steps) for span in spans], "waiting", 1)
    _finish(axes, "requests")


def _cache(axes: Axes, spans: Sequence[Span], num_blocks: int) -> None:
    used = [100 * span.sum_used_blocks / max(1, span.num_steps * num_blocks) for span in spans]
    _stairs(axes, spans, used, "blocks in use", 0)
    began = [span.num_admitted_tokens or math.nan for span in spans]  # a gap where no prompt did
    hits = [100 * span.num_cached_tokens / tokens for span, tokens in zip(spans, began, strict=True)]
    _stairs(axes, spans, hits, "prompt tokens from the prefix cache", 2)
    axes.set_ylim(0, 105)
    _finish(axes, "%")


def _histogram(axes: Axes, histogram: Histogram, unit: str) -> None:
    bins = histogram.bins()
    labels = [_number(begin) for begin, _, _ in bins]
    axes.bar(range(len(bins)), [number for _, _, number in bins], width=0.9, align="edge", color=COLORS[0])
    every = max(1, len(bins) // 12)
    axes.set_xticks(range(0, len(bins), every), labels[::every])
    axes.set_xlabel(f"{unit}, from")
    axes.set_ylabel("rows")


def _stairs(axes: Axes, spans: Sequence[Span], values: Sequence[float], label: str, color: int) -> None:
    edges = [0.0, *accumulate(span.seconds for span in spans)]
    axes.stairs(values, edges, label=label, color=COLORS[color], linewidth=1.4)


def _finish(axes: Axes, unit: str) -> None:
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.18), ncols=2, frameon=False)


def _seconds(span: Span) -> float:
    return max(span.seconds, 1e-9)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
