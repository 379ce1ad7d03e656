"""What a job tells while it runs and at its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedllm.engine.run_log import RunLog
from pagedllm.engine.stats import EngineStats
from pagedllm.jobs import progress
from pagedllm.jobs.progress import JobProgress, summary
from pagedllm.jobs.report import JobReport
from pagedllm.progress import Bar

REPORT = JobReport(
    num_rows=1200,
    num_failed=2,
    num_cut=30,
    num_prompt_tokens=4000,
    num_completion_tokens=3000,
    num_cached_tokens=1000,
    num_preemptions=4,
    seconds=2.0,
    peak_num_blocks=512,
    num_blocks=1024,
    block_size=16,
    bytes_per_block=4096,
    first_error="row 3: prompt_too_long: 9 tokens exceed max_model_len 8 by 1",
    engine={"deterministic": True},
)


@pytest.mark.parametrize(("num_rows", "total"), [(5000, "1,200 of 5,000 rows"), (None, "1,200 rows")])
def test_a_line_now_and_then_where_nobody_looks(monkeypatch, capsys, num_rows, total):
    shown = JobProgress(num_rows, is_quiet=False)
    shown.show(REPORT)
    assert capsys.readouterr().err == ""  # 30 s have not passed
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    shown.show(REPORT)
    assert capsys.readouterr() == (
        "",
        f"pagedllm: {total}, 2 failed, 30 cut, in 2,000 tokens/s, out 1,500 tokens/s\n",
    )


def test_quiet_tells_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    JobProgress(10, is_quiet=True).show(REPORT)
    assert capsys.readouterr() == ("", "")


def test_the_summary_tells_rows_rates_prefix_hits_kv_use_and_preemptions():
    assert summary(REPORT).splitlines() == [
        "rows         1,200: 2 failed, 30 cut by a length",
        "time         2.0 s without loading",
        "tokens       in 4,000 (2,000 tokens/s), out 3,000 (1,500 tokens/s)",
        "prefix hits  25 % of the input tokens",
        "KV cache     peak 512 of 1,024 blocks of 16 tokens (2.0 MiB)",
        "preemptions  4",
        "deterministic yes: the same rows give the same tokens",
        "first error  row 3: prompt_too_long: 9 tokens exceed max_model_len 8 by 1",
    ]


def test_a_line_tells_how_long_it_will_take(monkeypatch, capsys):
    """In tokens: a third of them takes as long again twice."""
    log = RunLog(EngineStats(64, 16))
    log.seconds_left = lambda work, ended: 200.0
    report = replace(REPORT, log=log, num_known_rows=1500, knows_all_rows=True)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    JobProgress(3000, is_quiet=False).show(report)
    assert capsys.readouterr().err.endswith(", 3 min 20 s left\n")
    window = replace(report, knows_all_rows=False)  # 1,500 rows by now: 202 s in all
    assert window.seconds_left(3000) == pytest.approx(402)
    assert window.seconds_left(None) is None


def test_the_bar_shows_the_time_left_by_tokens(monkeypatch, capsys):
    bar = Bar(1000, "Processed prompts", is_shown=True)
    monkeypatch.setattr(bar._bar, "delay", 0)
    monkeypatch.setattr(bar._bar, "mininterval", 0)
    bar.show(412, 2000, 1000, 12, lambda: 44.0)
    bar.close()
    text = capsys.readouterr().err
    assert "Processed prompts: 412/1000 [" in text
    assert "<00:44, " in text
    assert "cut 3 %" in text
