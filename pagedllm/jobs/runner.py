"""A job: the rows of a file through the engine into a file of results, never lost, never computed twice.

`open_job` checks files and parameters before a model is loaded; `Job.run` does the work. With a regular file as OUT the
whole job is planned (planned.py), every finished row is in the journal at once, and the same call again continues; to a
pipe or stdout rows go as they come (stream.py). A bad row costs itself only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import pagedllm
from pagedllm.assembly import Assembly
from pagedllm.config import EngineConfig
from pagedllm.errors import NotSupportedError, PagedLLMError
from pagedllm.fingerprint import model_digest
from pagedllm.jobs.files import IfExists, JobFiles, Order, Retry, StreamFile, is_stream
from pagedllm.jobs.formats import columns_text, parse_row, result_line
from pagedllm.jobs.journal import Journal
from pagedllm.jobs.openai import OpenAILines, is_openai_line
from pagedllm.jobs.planned import Finished, PlannedWork, RowTable, Window
from pagedllm.jobs.report import JobReport
from pagedllm.jobs.rows import RowReader
from pagedllm.jobs.source import Line, Source, find_inputs
from pagedllm.jobs.stream import StreamWork
from pagedllm.model.hub import find_cached
from pagedllm.outputs import RESULT_COLUMNS, result_columns
from pagedllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

NUM_FIRST_ROWS = 100  # if all of these fail, so will the rest
RECOVERY_ROWS = 1024
TABLE_SUFFIXES = (".parquet", ".csv", ".tsv", ".arrow", ".xlsx")
OnProgress = Callable[[JobReport], None]


class TooManyFailures(PagedLLMError):
    """The first rows all failed, or more rows than the caller allows; the message quotes the first reason."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The keywords of `open_job`, checked."""

    sampling_params: Mapping[str, Any]
    if_exists: IfExists = "resume"
    retry: Retry | None = None
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)
    order: Order = "input"
    max_failed: int | float | None = None  # rows, or a share (a float)

    def __post_init__(self) -> None:
        for name, choices in (
            ("if_exists", ("resume", "overwrite", "fail")),
            ("retry", (None, "failed", "cut")),
            ("order", ("input", "completion")),
        ):
            if getattr(self, name) not in choices:
                words = ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 1):
            raise ValueError(f"limit must be None or an int >= 1, got {self.limit!r}")
        number, num_shards = self.shard
        if not 1 <= number <= num_shards:
            raise ValueError(f"shard must be (i, n) with 1 <= i <= n, got {self.shard!r}")
        if self.max_failed is not None and not 0 <= self.max_failed <= (
            1 if isinstance(self.max_failed, float) else float("inf")
        ):
            raise ValueError(f"max_failed must be None, an int >= 0 or a share from 0.0 to 1.0, got {self.max_failed}")
        if self.retry is not None and self.if_exists != "resume":
            raise ValueError(f"retry={self.retry!r} continues a job: it needs if_exists='resume'")


class Job:
    """Rows in, lines out. Made by `open_job`, which closes the files."""

    def __init__(
        self,
        source: Source | None,
        lines: Iterator[Line],
        output: JobFiles | StreamFile,
        options: JobOptions,
        openai: OpenAILines | None = None,
    ) -> None:
        self._source = source  # None: nothing to do
        self._lines = lines
        self._output = output
        self._options = options
        self._openai = openai  # None: plain rows
        self._journal: Journal | None = None
        self._num_first_failed = 0
        self._num_rows: int | None = None  # of the whole job, where it is known
        self.report = JobReport()
        self.is_done = False  # by an earlier run: nothing to do

    @property
    def partial(self) -> Path | None:
        """The file that holds what is written until the job is finished."""
        return self._output.partial if isinstance(self._output, JobFiles) and self._output.partial.exists() else None

    @property
    def num_written(self) -> int:
        if isinstance(self._output, StreamFile):
            return self._output.num_lines
        return self._journal.num_lines if self._journal is not None else 0

    def count_rows(self) -> int | None:
        """How many rows the input has; None where it cannot be read twice."""
        if self._num_rows is None and self._source is not None:
            self._num_rows = self._source.count()
        return self._num_rows

    def allows_failures(self) -> bool:
        """Whether no more rows failed than `max_failed` allows."""
        limit = self._options.max_failed
        if isinstance(limit, float):
            limit = limit * self.report.num_rows
        return self.report.num_failed <= (limit or 0)

    def run(self, assembly: Assembly, config: EngineConfig, on_progress: OnProgress | None = None) -> JobReport:
        """Runs all rows and makes the result file; on_progress is told after each step.

        Raises JobRefused where the files there are of another job, TooManyFailures, ModelError for the model's own
        sampling defaults, and OSError where a result cannot be written; what is written then stays.
        """
        if self.is_done:
            return self.report
        started = time.perf_counter()
        if isinstance(self._options.max_failed, float):
            self.count_rows()
        assembly.defaults.params()  # a wrong generation_config.json is not every row's error
        defaults = {**assembly.defaults.values, **self._options.sampling_params}
        parse = parse_row if self._openai is None else self._openai.parse
        reader = RowReader(assembly, self._lines, parse, config.seed, defaults)
        given = self._options.sampling_params
        assembly.notices.tell(f"rows without sampling_params: {assembly.defaults.describe(given)}", INFO)
        report = self.report
        report.num_blocks, report.block_size = assembly.num_blocks, assembly.block_size
        report.bytes_per_block = assembly.bytes_per_block

        def note_step() -> None:
            report.seconds = time.perf_counter() - started
            report.peak_num_blocks = assembly.engine.stats.peak_num_blocks
            if on_progress is not None:
                on_progress(report)

        if isinstance(self._output, StreamFile):
            self._run_stream(assembly, reader, self._output, note_step)
        else:
            self._run_file(assembly, reader, self._output, job_of(assembly, config, defaults), note_step)
        self._tell_of_lines(assembly, config)
        return report

    def _run_stream(
        self, assembly: Assembly, reader: RowReader, output: StreamFile, note_step: Callable[[], None]
    ) -> None:
        work = StreamWork(assembly, reader, is_ordered=self._options.order == "input")
        with contextlib.closing(work.steps()) as steps:
            for finished in steps:
                for ready, result in finished:
                    columns = result_columns(result)
                    if self._openai is None:
                        output.write(result_line(ready.row.raw, columns_text(columns)))
                    else:
                        output.write(self._openai.render(ready.row.raw, columns, ready.id.hex()))
                    self.report.count(result)
                    if result.error is not None:
                        self._check_failures(ready.row.index)
                note_step()

    def _run_file(
        self,
        assembly: Assembly,
        reader: RowReader,
        files: JobFiles,
        job: Mapping[str, Any],
        note_step: Callable[[], None],
    ) -> None:
        assert self._source is not None
        was_finished = files.is_finished
        journal = self._journal = files.begin(job, may_grow=self._options.retry == "cut")
        if was_finished:
            if self._openai is not None:
                text = "a finished OpenAI batch whose input or settings changed is not continued yet"
                raise NotSupportedError(f"{text}: pass another output, or if_exists='overwrite'")
            self._recover(assembly, files.final, journal, reader)
        if self._openai is not None and files.manifest is not None:
            self._openai.created = files.manifest.get("created", self._openai.created)
        created = self._openai.created if self._openai is not None else int(time.time())
        files.note(job, "running", pagedllm=pagedllm.__version__, created=created)
        num_before = journal.num_lines
        if journal.num_damaged:
            assembly.notices.tell(f"{files.partial}: {journal.num_damaged:,} damaged lines are left out")

        def finish(finished: list[Finished]) -> None:
            journal.append([(row.id, row.output.index, _journal_columns(row)) for row in finished])
            for row in finished:
                self.report.count(row.output, row.num_rows)
                if row.output.error is not None:
                    self._check_failures(row.output.index)

        def tell_scanned(table: RowTable, window: Window) -> None:
            if num_before:
                _tell_continuing(assembly, journal, table, self.report.num_resumed, self._num_rows)

        work = PlannedWork(
            assembly,
            reader,
            journal,
            self.report,
            finish,
            retries_failed=self._options.retry == "failed",
            note_failed=self._check_failures,
            tell_scanned=tell_scanned,
        )
        with contextlib.closing(work.steps()) as steps:
            for _ in steps:
                note_step()
        files.commit(self._source, work.table, self._options.order, self._openai)
        report = self.report
        files.note(
            job,
            "finished",
            pagedllm=pagedllm.__version__,
            created=created,
            given=dict(self._options.sampling_params),
            input=self._source.digest,
            order=self._options.order,
            rows=report.num_rows,
            failed=report.num_failed,
            cut=report.num_cut,
            first_error=report.first_error,
        )
        files.drop_journal()

    def _recover(self, assembly: Assembly, final: Path, journal: Journal, reader: RowReader) -> None:
        """Fills the journal from a finished OUT, whose rows hold what their names are made of."""
        source = Source(str(final))
        with contextlib.closing(source):
            places = []
            for line in source.lines():
                values = json.loads(line.text or b"null")
                places.append((values["row"], line.place))
            places.sort()
            naming = RowReader(assembly, iter(()), parse_row, 0, reader.defaults)
            for begin in range(0, len(places), RECOVERY_ROWS):
                results, lines = [], []
                for row, place in places[begin : begin + RECOVERY_ROWS]:
                    values = json.loads(source.line_at(place))
                    results.append({name: values.pop(name) for name in RESULT_COLUMNS})
                    lines.append(Line(row, place, json.dumps(values).encode()))
                journal.append(
                    [
                        (ready.id, ready.line.row, {name: result[name] for name in RESULT_COLUMNS[:-1]})
                        for ready, result in zip(naming.prepare(lines), results, strict=True)
                        if ready.params is not None
                    ]
                )

    def _tell_of_lines(self, assembly: Assembly, config: EngineConfig) -> None:
        """Notices of what OpenAI lines asked for and did not get."""
        if self._openai is None:
            return
        if self._openai.model is not None and self._openai.model not in (config.model, Path(config.model).name):
            assembly.notices.tell(f"the lines ask for model {self._openai.model!r}: {config.model} answered")
        if self._openai.ignored:
            assembly.notices.tell(f"fields of the lines that change no answer here: {', '.join(self._openai.ignored)}")

    def _check_failures(self, index: int) -> None:
        """Called for every row that failed. Raises TooManyFailures."""
        report, limit = self.report, self._options.max_failed
        if index < NUM_FIRST_ROWS and limit != 1.0:
            self._num_first_failed += 1
            if self._num_first_failed == NUM_FIRST_ROWS:
                raise TooManyFailures(f"the first {NUM_FIRST_ROWS} rows all failed; {report.first_error}")
        if isinstance(limit, float):
            if self._num_rows is None:
                return  # judged at the end
            limit = limit * self._num_rows
        if limit is not None and report.num_failed > limit:
            raise TooManyFailures(f"{report.num_failed:,} rows failed, more than allowed; {report.first_error}")


@contextlib.contextmanager
def open_job(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    config: EngineConfig | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    if_exists: IfExists = "resume",
    retry: Retry | None = None,
    limit: int | None = None,
    shard: tuple[int, int] = (1, 1),
    order: Order = "input",
    max_failed: int | float | None = None,
) -> Iterator[Job]:
    """Checks parameters and files, and opens them; "-" is stdin or stdout. No model is needed for it.

    config: of the LLM that will run it; with it a job that is finished already is known at once (`Job.is_done`).
    Raises ValueError or NotSupportedError for parameters, OSError for files (as Source and JobFiles tell), and
    ValueError where a field of the first row has the name of a result column.
    """
    options = JobOptions(dict(sampling_params or {}), if_exists, retry, limit, shard, order, max_failed)
    if SamplingParams.from_json(options.sampling_params).logprobs is not None:
        raise NotSupportedError("logprobs in files are not supported yet: leave it out")
    input, output = os.fspath(input), os.fspath(output)
    for path in (input, output):
        if path.lower().endswith(TABLE_SUFFIXES):
            raise NotSupportedError(
                f"{path!r}: only JSON lines (.jsonl, .jsonl.gz) are supported yet: convert the file"
            )
    if output.lower().endswith(".gz"):
        raise NotSupportedError(f"{output!r}: a compressed output is not supported yet: leave .gz out")
    with contextlib.ExitStack() as stack:
        files: JobFiles | StreamFile
        spool_folder = None
        paths = find_inputs(input)
        for path in paths:
            if path != "-" and not os.path.exists(path):
                raise FileNotFoundError(2, "No such file or directory", path)
        if is_stream(output):
            if retry is not None:
                raise ValueError(f"retry={retry!r} needs a file as output: nothing of {output!r} can be continued")
            files = StreamFile(output)
        else:
            files = JobFiles(output, paths, if_exists)
            spool_folder = files.final.parent
        stack.callback(files.close)
        if isinstance(files, JobFiles) and config is not None and _is_finished(files, input, options, config):
            assert files.manifest is not None
            job = Job(None, iter(()), files, options)
            job.is_done = True
            job.report.count_resumed(files.manifest["rows"], files.manifest["failed"], files.manifest["cut"])
            job.report.first_error = files.manifest["first_error"]
            files.drop_journal()
            yield job
            return
        source = Source(input, limit=limit, shard=shard, spool_folder=spool_folder)
        stack.callback(source.close)
        lines = source.lines()
        first = next(lines, None)
        openai = OpenAILines(int(time.time())) if first is not None and is_openai_line(first.text) else None
        clash = parse_row(first.text, 0).clash if first is not None and openai is None else None
        if clash is not None:
            raise ValueError(f"{input}: the field {clash!r} has the name of a result column: rename it")
        yield Job(source, _chained(first, lines), files, options, openai)


def job_of(assembly: Assembly, config: EngineConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must agree in so that one may continue the other."""
    job = {
        "model": model_digest(assembly.located),
        "seed": config.seed,
        **assembly.numerics,
        "sampling": {"max_tokens": DEFAULT_MAX_TOKENS, **defaults},
    }
    values: dict[str, Any] = json.loads(json.dumps(job))
    return values


def _is_finished(files: JobFiles, input: str, options: JobOptions, config: EngineConfig) -> bool:
    """Whether OUT holds the results of just this job, and nothing is to be retried."""
    manifest = files.manifest
    if manifest is None or not files.is_finished or options.if_exists != "resume":
        return False
    to_retry = {"failed": manifest["failed"], "cut": manifest["cut"], None: 0}[options.retry]
    job = manifest["job"]
    located = find_cached(config)
    if to_retry or located is None or (job["model"], job["seed"]) != (model_digest(located), config.seed):
        return False
    given = json.loads(json.dumps(dict(options.sampling_params)))
    if manifest["given"] != given or manifest["order"] != options.order:
        return False
    source = Source(input, limit=options.limit, shard=options.shard)
    with contextlib.closing(source):
        if not source.can_be_read_twice:
            return False
        for _ in source.lines():
            pass
        return source.digest == str(manifest["input"])


def _chained(first: Line | None, lines: Iterator[Line]) -> Iterator[Line]:
    if first is not None:
        yield first
    yield from lines


def _journal_columns(row: Finished) -> dict[str, Any]:
    columns = result_columns(row.output)
    del columns["row"]  # of the input as it will be at the end
    return columns


def _tell_continuing(
    assembly: Assembly, journal: Journal, table: RowTable, num_done: int, num_rows: int | None
) -> None:
    """One line for people: how much is done, and what changed in the input since."""
    text = f"continuing: {num_done:,} of {num_rows if num_rows is not None else len(table.rows):,} rows done"
    assembly.notices.tell(text, INFO)
