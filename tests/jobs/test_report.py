"""The report of a job: numbers, course, limits; pages that hold no text unasked, escape everything, reach nowhere."""

from __future__ import annotations

import html.parser
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from pagedllm import LLM
from pagedllm.engine.run_log import MAX_SPANS, Ended, RunLog, Work
from pagedllm.engine.stats import EngineStats
from pagedllm.jobs import report_page
from pagedllm.jobs.report import Histogram
from pagedllm.jobs.report_page import NO_CHARTS, as_html, write_report
from tests.fake_assembly import fake_assemble

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = {"temperature": 0, "max_tokens": 4}
NASTY = "<script>alert(1)</script>\"'&|`[x](http://evil.example)\u2028"


@pytest.fixture
def run(tmp_path):
    def run(rows, llm_arguments=None, **options):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with LLM("fake", **(llm_arguments or {})) as llm:
            options = {"sampling_params": GREEDY, "if_exists": "overwrite", **options}
            return llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)

    return run


def letters(number: int, length: int = 5) -> list[dict[str, str]]:
    rng = random.Random(0)
    return [{"prompt": "".join(rng.choices("abcdefgh", k=length))} for _ in range(number)]


def test_the_numbers_of_a_run(run):
    report = run([*letters(30), {"prompt": 5}, {"prompt": "x" * 200}])
    assert (report.num_rows, report.num_failed, report.num_cut, report.is_finished) == (32, 2, 30, True)
    assert report.deterministic
    assert [(row.row, row.code) for row in report.failed_rows] == [(30, "invalid_parameter"), (31, "prompt_too_long")]
    assert sum(number for _, _, number in report.prompt_lengths.bins()) == 30
    assert report.output_lengths.bins() == [(4.0, 2**2.5, 30)]
    assert len(report.slowest_rows()) == 10
    assert report.log.total.num_output_tokens == 120
    assert sum(span.num_output_tokens for span in report.log.spans) == 120
    assert report.plan.num_to_run == 30
    assert 0 < report.log.total.seconds <= report.seconds


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"max_num_seqs": 2}, "max_num_seqs 2"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 64}, "max_num_batched_tokens 8"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 4096}, "KV cache"),
    ],
)
def test_what_limited_the_run_is_named(run, monkeypatch, arguments, word):
    """1,000 prompts: the sequences, the budget or the blocks."""
    monkeypatch.setattr("pagedllm.llm.assemble", lambda config: fake_assemble(config, num_blocks=32))
    report = run(letters(300, 30), arguments)
    assert word in report.limits()[0]
    assert int(report.limits()[0].split(" %")[0]) > 50


def test_rows_that_nobody_waits_behind_are_named(run):
    assert "nobody waited" in run(letters(3)).limits()[0]


def test_a_pages_texts_are_asked_for_and_escaped(run, tmp_path):
    rows = [{"prompt": "a", "sampling_params": {"temprature" + NASTY: 1}}, *letters(3)]
    for suffix in (".html", ".md", ".json"):
        path = tmp_path / f"report{suffix}"
        run(rows, report=path)
        assert "temprature" not in path.read_text()
        run(rows, report=path, report_text=True)
        text = path.read_text()
        assert "temprature" in text
        assert suffix == ".json" or "<script" not in text
        assert suffix != ".md" or "](" not in text.replace("\\](", "")
        outputs = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(output in text for output in outputs[1:])


class Page(html.parser.HTMLParser):
    """Collects tags and what they point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.targets.append(value)
            if name == "id":
                self.ids.append(value)


def test_the_page_holds_all_it_needs(run, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts of a report are drawn by the extra `charts`")
    path = tmp_path / "report.html"
    run(letters(40), report=path)
    text = path.read_text()
    page = Page(text)
    assert page.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert all(target.startswith("#") for target in page.targets)
    assert len(page.ids) == len(set(page.ids))
    targets = {target[1:] for target in page.targets} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert targets <= set(page.ids)
    assert "Content-Security-Policy" in text
    for title in ("Throughput", "Requests in the engine", "KV cache in use and prefix hits", "Slowest rows"):
        assert title in text


def test_charts_change_no_settings_and_no_figures_of_the_caller(run, tmp_path):
    mpl = pytest.importorskip("matplotlib", reason="the charts of a report are drawn by the extra `charts`")
    before = dict(mpl.rcParams)
    run(letters(5), report=tmp_path / "report.html")
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_without_the_library_the_page_says_how_to_get_charts(run, monkeypatch):
    report = run(letters(5))
    monkeypatch.setattr(report_page, "has_charts", lambda: False)
    page = as_html(report)
    assert NO_CHARTS.replace("'", "&#x27;") in page
    assert "<svg" not in page


def test_a_name_that_says_no_format_is_refused_before_the_model_loads(run, tmp_path):
    with pytest.raises(ValueError, match=r"report must end with one of .html, .json, .md, got '.*report.pdf'"):
        run(letters(1), report=tmp_path / "report.pdf")
    with pytest.raises(FileNotFoundError, match="No such folder"):
        run(letters(1), report=tmp_path / "nowhere" / "report.md")


def test_a_run_that_stops_leaves_its_report(run, tmp_path):
    with pytest.raises(Exception, match="the first 100 rows all failed"):
        run([{"prompt": 5}] * 200, report=tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert (values["is_finished"], values["num_failed"] >= 100) == (False, True)


def test_a_job_that_is_done_has_a_report_too(run, tmp_path):
    run(letters(5))
    report = run(letters(5), if_exists="resume", report=tmp_path / "report.html")
    assert report.num_resumed == 5
    assert "<td>finished</td>" in (tmp_path / "report.html").read_text()


def test_the_page_opens_in_a_browser(run, tmp_path):
    """Looked at by people; here: it renders, whole, without a script and without a connection."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (apt install chromium): the page was not opened")
    pytest.importorskip("matplotlib", reason="the charts of a report are drawn by the extra `charts`")
    path = tmp_path / "report.html"
    write_report(str(path), run(letters(40)))
    image = tmp_path / "page.png"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options += ["--window-size=1000,2400", f"--screenshot={image}", path.as_uri()]
        done = subprocess.run([browser, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Refused to" not in done.stderr  # what the page's own policy forbids is not in it
    pixels = pytest.importorskip("matplotlib.image").imread(image)
    height = pixels.shape[0]
    is_dark = (pixels[..., :3].min(axis=2) < 0.7).any(axis=1)
    assert is_dark[: height // 8].any()
    colored = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2) > 0.3).any(axis=1)
    assert colored.sum() > 300  # the charts


def test_bins_of_a_histogram():
    histogram = Histogram()
    for value in (0, 1, 3, 3, 4):
        histogram.add(value)
    assert [(round(begin, 2), round(end, 2), n) for begin, end, n in histogram.bins()] == [
        (0, 0, 1),
        (1, 1.41, 1),
        (1.41, 2, 0),
        (2, 2.83, 0),
        (2.83, 4, 2),
        (4, 5.66, 1),
    ]
    assert (histogram.quantile(0.0), histogram.quantile(0.5), histogram.quantile(1.0)) == (0, 4, 4)
    assert Histogram().bins() == []


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("pagedllm.engine.run_log.time", clock)
    return clock


def test_the_course_stays_bounded(clock):
    stats = EngineStats(64, 16)
    log = RunLog(stats)
    for _ in range(20_000):
        clock.now += 0.05
        stats.num_steps += 1
        stats.num_output_tokens += 3
        log.note_step(stats)
    assert MAX_SPANS // 2 <= len(log.spans) <= MAX_SPANS
    assert sum(span.num_steps for span in log.spans) == 20_000
    assert sum(span.num_output_tokens for span in log.spans) == 60_000
    assert sum(span.seconds for span in log.spans) == pytest.approx(1000)


def test_the_time_left_follows_the_tokens_that_are_left(clock):
    """Long prompts first, then none: their price is known apart from that of outputs."""
    stats, ended = EngineStats(64, 16), Ended()
    log, work = RunLog(stats), Work(10, 5_000, 2_000)
    assert log.seconds_left(work, ended) is None
    stats.num_running = 10
    for step in range(100):  # 10 ms for 10 output tokens, and 1 ms for each of the 40 prompt tokens beside them
        clock.now += 0.010 + (0.040 if step % 2 else 0)
        stats.num_steps += 1
        stats.num_output_tokens += 10
        stats.num_computed_tokens += 10 + (40 if step % 2 else 0)
        log.note_step(stats)
    left = log.seconds_left(work, ended)
    assert left == pytest.approx((5_000 - 2_000 - 10) * 0.001 + (2_000 - 1_000) * 0.001, rel=0.02)


def test_outputs_that_stop_early_are_expected_to_go_on_doing_so(clock):
    stats, ended = EngineStats(64, 16), Ended()
    log, work = RunLog(stats), Work(1_000, 0, 200_000)
    for _ in range(100):
        clock.now += 0.01
        stats.num_output_tokens += 10
        stats.num_computed_tokens += 10
        stats.num_finished_requests += 1
        ended.add(10, 200, "stop")  # one a step, after ten tokens
        log.note_step(stats)
    assert log.seconds_left(work, ended) == pytest.approx(900 * 10 * 0.001, rel=0.05)
