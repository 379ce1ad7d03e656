"""A JobReport as a file: .html (one page that needs nothing else), .json or .md.

Rows stand there by number and id only; texts come in where they are asked for. Everything is escaped, and the page
itself forbids scripts and every connection, whatever stands in it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pagedllm.jobs.charts import draw_charts, has_charts
from pagedllm.jobs.plan import duration
from pagedllm.jobs.report import JobReport

SUFFIXES = (".html", ".json", ".md")
NO_CHARTS = "Charts are drawn where matplotlib is installed: pip install 'pagedllm[charts]'."
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>pagedllm: report of a job</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
tbody tr { border-top: 1px solid #d9e0e7; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .85em; } figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
</head>
<body>
"""


def check_report_path(path: str) -> None:
    """Raises ValueError for a name that says no format, OSError where its folder is none; before a model is loaded."""
    if not path.lower().endswith(SUFFIXES):
        raise ValueError(f"report must end with one of {', '.join(SUFFIXES)}, got {path!r}")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such folder", str(folder))


def write_report(path: str, report: JobReport, *, has_texts: bool = False) -> None:
    """The form follows from the name."""
    make: Callable[..., str] = {".html": as_html, ".json": as_json, ".md": as_markdown}[Path(path).suffix.lower()]
    Path(path).write_text(make(report, has_texts=has_texts), encoding="utf-8")


def as_json(report: JobReport, *, has_texts: bool = False) -> str:
    return json.dumps(report.to_dict(has_texts=has_texts), indent=1, ensure_ascii=False) + "\n"


def as_markdown(report: JobReport, *, has_texts: bool = False) -> str:
    lines = ["# Report of a job", ""]
    for title, names, rows in _tables(report, has_texts):
        lines += [f"## {title}", "", _markdown_row(names), _markdown_row(["---"] * len(names))]
        lines += [*map(_markdown_row, rows), ""]
    return "\n".join(lines)


def as_html(report: JobReport, *, has_texts: bool = False) -> str:
    return f"{HEAD}<h1>Report of a job</h1>\n{as_fragment(report, has_texts=has_texts)}</body>\n</html>\n"


def as_fragment(report: JobReport, *, has_texts: bool = False) -> str:
    """What stands on the page, for a notebook."""
    (title, names, rows), *others = _tables(report, has_texts)
    parts = [_html_table(title, names, rows)]
    if has_charts():
        parts.append('<h2>Charts</h2>\n<div class="charts">\n')
        parts += [
            f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>\n"
            for title, svg in draw_charts(report)
        ]
        parts.append("</div>\n")
    else:
        parts.append(f"<p>{html.escape(NO_CHARTS)}</p>\n")
    parts += [_html_table(*table) for table in others]
    return "".join(parts)


def _tables(report: JobReport, has_texts: bool) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, column names, rows) each; the summary first."""
    tables = [("Summary", ["", ""], _summary(report))]
    if report.plan is not None:
        plan = [[line[:12].strip(), line[13:]] for line in report.plan.text(0).splitlines()[2:7]]
        tables.append(("Plan", ["", ""], plan))
    if report.engine:
        tables.append(("Engine", ["", ""], [[name, str(value)] for name, value in report.engine.items()]))
    slowest = [
        [str(row.row), row.id, f"{row.seconds:.2f}", str(row.prompt_tokens), str(row.completion_tokens)]
        + [row.finish_reason]
        + ([row.text] if has_texts else [])
        for row in report.slowest_rows()
    ]
    failed = [[str(row.row), row.id, row.code] + ([row.message] if has_texts else []) for row in report.failed_rows]
    if slowest:
        names = ["row", "id", "seconds", "prompt tokens", "output tokens", "finish reason"]
        tables.append(("Slowest rows", names + ["output"] * has_texts, slowest))
    if failed:
        names = ["row", "id", "error"] + ["message"] * has_texts
        title = "Failed rows" if report.num_failed == len(failed) else f"Failed rows: {len(failed)} of them"
        tables.append((title, names, failed))
    return tables


def _summary(report: JobReport) -> list[list[str]]:
    seconds = max(report.seconds, 1e-9)
    rows = [
        ["state", "finished" if report.is_finished else "not finished: the same command continues"],
        ["rows", f"{report.num_rows:,}"],
        ["of those done before", f"{report.num_resumed:,}"],
        ["answered by an equal row", f"{report.num_equal:,}"],
        ["failed", f"{report.num_failed:,}"],
        ["cut by a length", f"{report.num_cut:,}"],
        ["time without loading", duration(report.seconds)],
        ["input tokens", f"{report.num_prompt_tokens:,} ({report.num_prompt_tokens / seconds:,.0f} per second)"],
        [
            "output tokens",
            f"{report.num_completion_tokens:,} ({report.num_completion_tokens / seconds:,.0f} per second)",
        ],
        [
            "prefix hits",
            f"{100 * report.num_cached_tokens / max(1, report.num_prompt_tokens):.0f} % of the input tokens",
        ],
        [
            "KV cache, at most",
            f"{report.peak_num_blocks:,} of {report.num_blocks:,} blocks of {report.block_size} tokens",
        ],
        ["preemptions", f"{report.num_preemptions:,}"],
        ["deterministic", "yes" if report.deterministic else "no"],
    ]
    rows += [["limited by", limit] for limit in report.limits()]
    for title, unit, histogram in (
        ("tokens of a prompt", "", report.prompt_lengths),
        ("tokens of an output", "", report.output_lengths),
        ("seconds of a row", " s", report.latencies),
    ):
        if histogram.bins():
            half, most = histogram.quantile(0.5), histogram.quantile(0.95)
            text = f"half under {half:,.3g}{unit}, 95 % under {most:,.3g}{unit}, largest {histogram.largest:,.3g}{unit}"
            rows.append([title, text])
    return rows


def _html_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cell(name: str, value: str) -> str:
        if name in ("output", "message"):
            return f'<td class="text">{html.escape(value)}</td>'
        if name == "id":
            return f"<td><code>{html.escape(value)}</code></td>"
        is_number = value.replace(".", "", 1).isdigit() and name
        return f"<td{' class=number' if is_number else ''}>{html.escape(value)}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "\n".join(
        f"<tr>{''.join(cell(name, value) for name, value in zip(names, row, strict=True))}</tr>" for row in rows
    )
    thead = f"<thead><tr>{head}</tr></thead>" if any(names) else ""
    return f"<h2>{html.escape(title)}</h2>\n<table>{thead}<tbody>\n{body}\n</tbody></table>\n"


def _markdown_row(cells: Sequence[str]) -> str:
    """A row of a table: nothing in a cell ends it, or is taken for HTML or a link."""
    return f"| {' | '.join(_markdown_cell(cell) for cell in cells)} |"


def _markdown_cell(text: str) -> str:
    text = html.escape(text, quote=False)
    for character in "\\`*_[]|#":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
