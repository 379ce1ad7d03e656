"""A job: the rows of a file through the engine into a file of results, never lost, never computed twice.

`open_job` checks files and parameters before a model is loaded; `Job.run` does the work. With a regular file as OUT the
whole job is planned (planned.py), every finished row is in the journal at once, and the same call again continues; to a
pipe or stdout rows go as they come (stream.py). A bad row costs itself only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from logging import INFO
from pathlib import Path
from typing import Any

import pagedllm
from pagedllm.assembly import Assembly
from pagedllm.config import EngineConfig
from pagedllm.engine.run_log import RunLog
from pagedllm.errors import PagedLLMError
from pagedllm.fingerprint import model_digest
from pagedllm.jobs.changes import count_changes
from pagedllm.jobs.files import JobFiles, StreamFile
from pagedllm.jobs.formats import PlainRows, columns_text
from pagedllm.jobs.journal import Journal
from pagedllm.jobs.openai import OpenAILines
from pagedllm.jobs.options import JobOptions
from pagedllm.jobs.plan import LOGGED_CHARACTERS, JobPlan
from pagedllm.jobs.planned import Finished, PlannedWork, RowTable, Window
from pagedllm.jobs.recovery import facts_for_recovery, recover
from pagedllm.jobs.report import JobReport
from pagedllm.jobs.report_page import write_report
from pagedllm.jobs.rows import RowReader
from pagedllm.jobs.score_rows import LOGLIKELIHOOD, PARAMS
from pagedllm.jobs.source import Line, Source
from pagedllm.jobs.stream import StreamWork
from pagedllm.outputs import RequestOutput
from pagedllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

RECORDED = ("num_threads", "max_num_seqs", "max_num_batched_tokens", "block_size")  # in the manifest; none binds
NUM_FIRST_ROWS = 100  # if all of these fail, so will the rest
OnProgress = Callable[[JobReport], None]
OnPlan = Callable[[JobPlan], None]


class TooManyFailures(PagedLLMError):
    """The first rows all failed, or more rows than the caller allows; the message quotes the first reason."""


class Job:
    """Rows in, lines out. Made by `open_job`, which closes the files."""

    def __init__(
        self,
        source: Source | None,
        lines: Iterator[Line],
        output: JobFiles | StreamFile,
        options: JobOptions,
        rows: PlainRows | OpenAILines | None,
    ) -> None:
        """source, rows: None where there is nothing to do. lines: of the source, those read already among them."""
        self._source = source
        self._lines = lines
        self._output = output
        self._options = options
        self._rows = rows
        self._openai = rows if isinstance(rows, OpenAILines) else None
        self._form = options.result_form()
        self._journal: Journal | None = None
        self._num_first_failed = 0
        self._num_rows: int | None = None  # of the whole job, where it is known
        self._created = int(time.time())  # the start of the job; an earlier run's where one is continued
        self.report = JobReport()
        self.is_done = False  # by an earlier run: nothing to do
        self.notices: list[str] = []  # for whoever runs it

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

    def run(
        self,
        assembly: Assembly,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        on_plan: OnPlan | None = None,
    ) -> JobReport:
        """Runs all rows and makes the result file; on_progress is told after each step, on_plan before the first.

        Raises JobRefused where the files there are of another job, RequestError for sampling parameters that the model
        cannot have, ModelError for the model's own, TooManyFailures, and OSError where a result cannot be written; what
        is written then stays. KeyboardInterrupt is raised again, and tells where that is.
        """
        try:
            return self.report if self.is_done else self._run(assembly, config, on_progress, on_plan)
        except KeyboardInterrupt as interrupt:
            if self.partial is not None:
                interrupt.args = (f"{self.num_written:,} results are in {self.partial}: the same call continues",)
            raise
        finally:
            if self._options.report is not None:
                write_report(os.fspath(self._options.report), self.report, has_texts=self._options.report_text)

    def _run(
        self, assembly: Assembly, config: EngineConfig, on_progress: OnProgress | None, on_plan: OnPlan | None
    ) -> JobReport:
        if isinstance(self._options.max_failed, float):
            self.count_rows()
        reader = self._reader(assembly, config)
        report = self.report
        report.num_blocks, report.block_size = assembly.num_blocks, assembly.block_size
        report.bytes_per_block = assembly.bytes_per_block
        report.engine = assembly.info
        log = report.log = RunLog(assembly.engine.stats)

        def note_step() -> None:
            log.note_step(assembly.engine.stats)
            report.note_step(log)
            if on_progress is not None:
                on_progress(report)

        if isinstance(self._output, StreamFile):
            self._run_stream(assembly, reader, self._output, note_step)
        else:
            self._run_file(assembly, config, reader, self._output, note_step, on_plan)
        self._tell_of_lines(assembly, config)
        report.is_finished = True
        return report

    def plan(self, assembly: Assembly, config: EngineConfig) -> JobPlan:
        """What `run` would do, its time measured. No result is written; a job must not be run after it.

        Raises as `run`, and for nothing that is wrong with a row.
        """
        reader, output = self._reader(assembly, config), self._output
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagedllm-")))
            if isinstance(output, JobFiles):
                job = job_of(assembly, config, reader.defaults, self._options)
                journal = output.peek(job, folder, may_grow=self._options.retry == "cut")
                if output.is_finished:
                    recover(output, journal, reader, self._options.prompt_form(), self._openai)
            else:
                journal = Journal(folder / "journal", is_new=True)
            stack.callback(journal.close)
            work = PlannedWork(
                assembly,
                reader,
                journal,
                self.report,
                lambda finished: None,
                retries=self._options.retry,
                note_failed=lambda index: None,
                tell_scanned=lambda table, window: None,
                folder=folder,
            )
            stack.callback(work.close)
            return work.plan(measures=True, always=True)

    def _reader(self, assembly: Assembly, config: EngineConfig) -> RowReader:
        """Raises RequestError, ModelError for sampling parameters that are every row's."""
        assert self._rows is not None
        assembly.defaults.params()  # a wrong generation_config.json is not every row's error
        given = self._options.sampling_params
        is_scored = self._options.task == LOGLIKELIHOOD
        defaults = PARAMS if is_scored else {**assembly.defaults.values, **given}
        assembly.builder.check_params(SamplingParams.from_json({}, defaults))
        for notice in self.notices:
            assembly.notices.tell(notice)
        if not is_scored:
            assembly.notices.tell(f"rows without sampling_params: {assembly.defaults.describe(given)}", INFO)
        manifest = self._output.manifest if isinstance(self._output, JobFiles) else None
        self._created = (manifest or {}).get("created", self._created)
        if self._openai is not None:
            self._openai.created = self._created

        def hint() -> None:
            if self._openai is None and assembly.builder.has_chat_template:
                text = "the model has a chat template, and `prompt` is sent as it is: --chat makes it a user message"
                assembly.notices.tell(text, INFO)

        return RowReader(
            assembly,
            self._lines,
            self._rows.parse,
            config.seed,
            defaults,
            check_params=self._form.check_params if self._openai is None else self._openai.check_params,
            clock=lambda: datetime.fromtimestamp(self._created),
            on_first_text=hint,
        )

    def _values(self, output: RequestOutput) -> dict[str, Any]:
        """The columns of a result but `row`, by their own names."""
        return self._form.values(output) if self._openai is None else self._openai.values(output)

    def _run_stream(
        self, assembly: Assembly, reader: RowReader, output: StreamFile, note_step: Callable[[], None]
    ) -> None:
        work = StreamWork(assembly, reader, is_ordered=self._options.order == "input")
        with contextlib.closing(work.steps()) as steps:
            for finished in steps:
                for ready, result in finished:
                    values = self._values(result)
                    if self._openai is None:
                        output.write(self._form.line(ready.row.raw, columns_text(values), ready.row.index))
                    else:
                        output.write(self._openai.render(ready.row.raw, values, ready.id.hex()))
                    self.report.count(result, row_id=ready.id.hex())
                    if result.error is not None:
                        self._check_failures(ready.row.index)
                note_step()

    def _run_file(
        self,
        assembly: Assembly,
        config: EngineConfig,
        reader: RowReader,
        files: JobFiles,
        note_step: Callable[[], None],
        on_plan: OnPlan | None,
    ) -> None:
        assert self._source is not None
        options = self._options
        job = job_of(assembly, config, reader.defaults, options)
        before = files.manifest or {}
        was_finished = files.is_finished
        journal = self._journal = files.begin(job, may_grow=options.retry == "cut")
        if was_finished:
            recover(files, journal, reader, options.prompt_form(), self._openai)
        num_before = journal.num_lines
        facts = self._facts(assembly, before)
        files.note(job, "running", **{**facts, **{name: before.get(name) for name in ("rows", "input")}})
        if journal.num_damaged:
            assembly.notices.tell(f"{files.partial}: {journal.num_damaged:,} damaged lines are left out")

        def finish(finished: list[Finished]) -> None:
            journal.append([(row.id, row.output.index, self._journal_values(row)) for row in finished])
            for row in finished:
                self.report.count(row.output, row.num_rows, row.id.hex())
                if row.output.error is not None:
                    self._check_failures(row.output.index)

        def tell_scanned(table: RowTable, window: Window) -> None:
            if num_before:
                text = f"continuing: {self.report.num_resumed:,} of {self._num_rows or len(table.rows):,} rows done"
                changes = count_changes(journal, table, before.get("rows")) if work.is_scanned else ""
                assembly.notices.tell(f"{text}{changes}", INFO)
                facts["is_mixed"] = facts["is_mixed"] or before.get("input") != source.digest
            if work.is_scanned:
                files.note(job, "running", **facts, rows=len(table.rows), input=source.digest)

        source = self._source
        work = PlannedWork(
            assembly,
            reader,
            journal,
            self.report,
            finish,
            retries=options.retry,
            note_failed=self._check_failures,
            tell_scanned=tell_scanned,
            folder=files.final.parent,
        )
        with contextlib.closing(work), contextlib.closing(work.steps()) as steps:
            plan = self.report.plan = work.plan(measures=on_plan is not None)
            if on_plan is not None:
                on_plan(plan)
            else:
                assembly.notices.tell(f"the plan\n{plan.text(LOGGED_CHARACTERS)}", INFO)
            assert self.report.log is not None
            self.report.log.restart_step(assembly.engine.stats)
            for _ in steps:
                note_step()
        self._commit(files, journal, work.table, job, facts)

    def _commit(
        self, files: JobFiles, journal: Journal, table: RowTable, job: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Makes OUT of input and journal, and the manifest that of a finished job."""
        assert self._source is not None
        options = self._options
        files.commit(self._source, table, options.order, self._form, self._openai)
        report = self.report
        files.note(
            job,
            "finished",
            **{**facts, "is_mixed": False},
            given=dict(options.sampling_params),
            input=self._source.digest,
            rows=report.num_rows,
            failed=report.num_failed,
            cut=report.num_cut,
            first_error=report.first_error,
            **facts_for_recovery(files, journal, table, options.order, self._form, self._openai),
        )
        files.drop_journal()

    def _facts(self, assembly: Assembly, before: Mapping[str, Any]) -> dict[str, Any]:
        """What the manifest records besides what binds. is_mixed: results of rows that have moved may be there."""
        assert self._source is not None
        options = self._options
        return {
            "pagedllm": pagedllm.__version__,
            "created": self._created,
            "lines": "plain" if self._openai is None else "openai",
            "input_path": self._source.input,
            "limit": options.limit,
            "order": options.order,
            "form": self._form.settings(),
            "is_mixed": before.get("is_mixed", False),
            "engine": {name: assembly.info[name] for name in RECORDED},
        }

    def _tell_of_lines(self, assembly: Assembly, config: EngineConfig) -> None:
        """Notices of what OpenAI lines asked for and did not get."""
        if self._openai is None:
            return
        if self._openai.model is not None and self._openai.model not in (config.model, Path(config.model).name):
            assembly.notices.tell(f"the lines ask for model {self._openai.model!r}: {config.model} answered")
        if self._openai.ignored:
            assembly.notices.tell(f"fields of the lines that change no answer here: {', '.join(self._openai.ignored)}")

    def _journal_values(self, row: Finished) -> dict[str, Any]:
        return {**({"cut": row.cut} if row.cut else {}), **self._values(row.output)}

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


def job_of(
    assembly: Assembly, config: EngineConfig, defaults: Mapping[str, Any], options: JobOptions
) -> dict[str, Any]:
    """What two runs must agree in so that one may continue the other."""
    job = {
        "model": model_digest(assembly.located),
        "seed": config.seed,
        **assembly.numerics,
        "task": options.task,
        "sampling": {"max_tokens": DEFAULT_MAX_TOKENS, **defaults},
        "prompts": options.prompt_form().settings(),
        "shard": options.shard,
    }
    values: dict[str, Any] = json.loads(json.dumps(job))
    return values
