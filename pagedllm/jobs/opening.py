"""open_job: every check that needs no model, then a Job with its files open.

The first readable row decides for the whole job: whether the lines are OpenAI's, which columns a template may name, and
whether a column of the input has a result column's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

from pagedllm.config import EngineConfig
from pagedllm.fingerprint import model_digest
from pagedllm.jobs import parquet
from pagedllm.jobs.files import JobFiles, StreamFile, is_stream
from pagedllm.jobs.formats import LineError, PlainRows, parse_object
from pagedllm.jobs.openai import OpenAILines, is_openai_line
from pagedllm.jobs.options import JobOptions
from pagedllm.jobs.runner import Job
from pagedllm.jobs.score_rows import COLUMN, LOGLIKELIHOOD
from pagedllm.jobs.source import Line, Source, find_inputs, is_compressed, kind_of
from pagedllm.model.hub import find_cached
from pagedllm.sampling_params import SamplingParams

MAX_LINES_TO_A_ROW = 100  # read in search of one that tells its columns
PLAIN_ONLY = ("task", "template", "chat", "system", "keep", "output_column", "output_prefix")


@contextlib.contextmanager
def open_job(
    input: str | os.PathLike[str], output: str | os.PathLike[str], *, config: EngineConfig | None = None, **options: Any
) -> Iterator[Job]:
    """Checks options (JobOptions) and files, and opens them; "-" is stdin or stdout. No model is needed for it.

    config: of the LLM that will run it; with it a job that is finished already is known at once (`Job.is_done`).
    Raises ValueError or NotSupportedError for options, OSError for files (as Source and JobFiles tell), and ValueError
    where the first row does not fit the options.
    """
    checked = JobOptions(**{"sampling_params": {}, **{k: v for k, v in options.items() if v is not None}})
    if config is not None:
        params = SamplingParams.from_json(checked.sampling_params)
        params.verify_for_model(sys.maxsize, config.max_logprobs)  # ids beyond the vocabulary: Job.run
    input, output = os.fspath(input), os.fspath(output)
    for name, path in (("input", input), ("output", output)):
        if not path:
            raise ValueError(f"{name} must name a file, got {path!r}")
    with contextlib.ExitStack() as stack:
        files = _open_output(input, output, checked)
        stack.callback(files.close)
        if isinstance(files, JobFiles) and config is not None and _is_finished(files, input, checked, config):
            yield _finished_job(files, checked)
            return
        spool_folder = files.final.parent if isinstance(files, JobFiles) else None
        source = Source(input, limit=checked.limit, shard=checked.shard, spool_folder=spool_folder)
        stack.callback(source.close)
        lines = source.lines()
        head, columns = _look_ahead(lines)
        rest = itertools.chain(head, lines)
        if columns is not None and is_openai_line(next(line.text for line in head if _columns(line) is not None)):
            _check_openai(checked, output)
            yield Job(source, rest, files, checked, OpenAILines())
            return
        form = checked.result_form()
        prompts = checked.prompt_form()
        if columns is not None:
            form.check_columns(columns)
            prompts = prompts.bind(columns)
            _check_columns(columns, source.kind, checked)
        is_scored = checked.task == LOGLIKELIHOOD
        rows = PlainRows(prompts, form.reserved(), is_table=source.kind != "jsonl", is_scored=is_scored)
        job = Job(source, rest, files, checked, rows)
        job.notices += _notices(columns or ())
        yield job


def _open_output(input: str, output: str, options: JobOptions) -> JobFiles | StreamFile:
    paths = find_inputs(input)
    for path in paths:
        if path != "-" and not os.path.exists(path):
            raise FileNotFoundError(2, "No such file or directory", path)
    for path in (*paths, output):
        if kind_of(path) == "parquet":
            parquet.need_pyarrow(path)
            if is_compressed(path):
                raise ValueError(f"{path!r}: Parquet is compressed inside: leave .gz out")
    if not is_stream(output):
        files = JobFiles(output)
        files.claim(paths, options.if_exists)
        return files
    if options.retry is not None:
        raise ValueError(f"retry={options.retry!r} needs a file as output: nothing of {output!r} can be continued")
    if kind_of(output) != "jsonl" or is_compressed(output):
        raise ValueError(f"{output!r} is no regular file: only JSON lines can be written to it")
    return StreamFile(output)


def _look_ahead(lines: Iterator[Line]) -> tuple[list[Line], Collection[str] | None]:
    """The lines read, and the columns of the first that is a row; None where there is none."""
    head: list[Line] = []
    for line in itertools.islice(lines, MAX_LINES_TO_A_ROW):
        head.append(line)
        columns = _columns(line)
        if columns is not None:
            return head, columns
    return head, None


def _columns(line: Line) -> Collection[str] | None:
    try:
        return parse_object(line.text, line.fault).keys()
    except LineError:
        return None


def _check_columns(columns: Collection[str], kind: str, options: JobOptions) -> None:
    """All rows of a table have the same columns: what none of them can give is refused at once."""
    listed = f"the columns are {', '.join(columns)}"
    has_prompt = options.template is not None or "prompt" in columns or "messages" in columns
    if kind != "jsonl" and not has_prompt:
        raise ValueError(f"no column is named prompt or messages, and there is no template to make prompts: {listed}")
    if options.task == LOGLIKELIHOOD and COLUMN not in columns:
        raise ValueError(f"task={options.task!r} scores the column {COLUMN!r}: {listed}")


def _check_openai(options: JobOptions, output: str) -> None:
    """OpenAI lines say all of their requests, and their results have one form."""
    defaults = {field.name: field.default for field in dataclasses.fields(JobOptions)}
    given = [name for name in PLAIN_ONLY if getattr(options, name) != defaults[name]]
    if given:
        raise ValueError(
            f"{given[0]}={getattr(options, given[0])!r} is for plain rows: the input is OpenAI batch lines"
        )
    for name in ("n", "logprobs"):
        if options.sampling_params.get(name) is not None:
            raise ValueError(f"{name} stands in the body of each OpenAI batch line: leave it out here")
    if kind_of(output) != "jsonl":
        raise ValueError(f"{output!r}: the results of OpenAI batch lines are JSON lines: name it .jsonl or .jsonl.gz")


def _notices(columns: Collection[str]) -> list[str]:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name in columns]
    if not names:
        return []
    return [f"columns named {', '.join(names)} are data: a row's own parameters stand in its sampling_params"]


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
    form = options.result_form().settings()
    if (manifest["given"], manifest["order"], manifest["form"]) != (given, options.order, form):
        return False
    if (job["prompts"], job["task"]) != (options.prompt_form().settings(), options.task):
        return False
    source = Source(input, limit=options.limit, shard=options.shard)
    with contextlib.closing(source):
        if not source.can_be_read_twice:
            return False
        for _ in source.lines():
            pass
        return source.digest == str(manifest["input"])


def _finished_job(files: JobFiles, options: JobOptions) -> Job:
    assert files.manifest is not None
    manifest = files.manifest
    job = Job(None, iter(()), files, options, None)
    job.is_done = True
    job.report.count_resumed(manifest["rows"], manifest["failed"], manifest["cut"])
    job.report.first_error = manifest["first_error"]
    job.report.is_finished = True
    files.drop_journal()
    return job
