"""The command line: `pagedllm run | status | export | merge | demo | cache | doctor | bench | --version`.

stdout carries results only; notices, progress and summary go to stderr. Exit codes: 0 done, 1 could not run or finish,
2 refused before any work, 3 rows failed, 130 and 143 interrupted. Arguments and files are checked before torch is
imported and before a model is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import pagedllm
from pagedllm import flags, job_commands
from pagedllm.config import EngineConfig
from pagedllm.errors import LibraryError, PagedLLMError, RequestError
from pagedllm.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, ROWS_FAILED, TERMINATED, complain
from pagedllm.machine_commands import add_machine_commands

if TYPE_CHECKING:
    from pagedllm.jobs.runner import Job


class Terminated(BaseException):
    """SIGTERM came."""


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(argv)
    args, unknown = parser.parse_known_args(flags.with_dashes(argv))
    if unknown and args.name == "run":
        args.parser.error(flags.unknown_flag(unknown[0], list(vars(args))))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.argv = argv
    command: Callable[[argparse.Namespace], int] = args.command
    with log_on_stderr(is_quiet=getattr(args, "quiet", True)), termination_raises():
        try:
            return command(args)
        except (KeyboardInterrupt, Terminated) as interrupt:
            return complain_of(interrupt)


def complain_of(interrupt: BaseException) -> int:
    return complain("interrupted", TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED)


def make_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagedllm", description="Offline batch inference of language models.")
    parser.add_argument("--version", action="version", version=f"pagedllm {pagedllm.__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        usage="pagedllm run -m MODEL -i IN -o OUT [OPTION ...]",
        help="run a file of prompts",
        description="Reads rows with `prompt` or `messages` and perhaps `sampling_params`, or OpenAI batch lines, and "
        "writes each with its output: all its fields, then output, finish_reason, stop_reason, prompt_tokens, "
        "completion_tokens, error and row. The names tell the kind of file: JSON lines (plain or .gz), .csv, .tsv or "
        ".parquet. The same command again continues. Exit codes: 0 finished, 1 could not run or finish, 2 refused "
        "before any work, 3 rows failed, 130 and 143 interrupted.",
    )
    run.add_argument("-i", "--input", required=True, metavar="IN", help="a file, a quoted pattern, or - for stdin")
    run.add_argument("-o", "--output", required=True, metavar="OUT", help="a file, or - for stdout")
    run.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    add_job_flags(run)
    add_row_flags(run)
    flags.add_llm_flags(run)
    flags.add_sampling_flags(run)
    run.set_defaults(command=run_command, parser=run)
    job_commands.add_parsers(commands)
    add_machine_commands(commands)
    bench = commands.add_parser("bench", help="measure speed, beside other engines")
    if "bench" in argv[:1]:
        from pagedllm.bench.cli import add_arguments

        add_arguments(bench)
    bench.set_defaults(command=bench_command)
    return parser


def add_job_flags(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("the job")
    group.add_argument(
        "--if-exists",
        choices=("resume", "overwrite", "fail"),
        default="resume",
        help="what to do if OUT or a part of it exists (default: resume)",
    )
    group.add_argument("--retry", choices=("failed", "cut"), help="run these rows of an earlier run again")
    group.add_argument("--dry-run", action="store_true", help="tell the plan, with the time it takes; write nothing")
    group.add_argument("--limit", type=int, metavar="N", help="the first N rows only")
    group.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="every N-th row from the I-th on")
    group.add_argument(
        "--order", choices=("input", "completion"), default="input", help="of the lines of OUT (default: input)"
    )
    group.add_argument(
        "--max-failed", type=_max_failed, metavar="N|P%", help="stop if more rows fail; no more than that is no error"
    )
    group.add_argument(
        "--report", metavar="FILE", help="how it went, as .html (with charts, by the extra `charts`), .json or .md"
    )
    group.add_argument("--report-text", action="store_true", help="quote some outputs in the report")


def add_row_flags(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("the rows; not for OpenAI batch lines")
    texts = group.add_mutually_exclusive_group()
    texts.add_argument("--template", metavar="TEXT", help="the prompt, with {column} for the columns of a row")
    texts.add_argument("--template-file", metavar="FILE", help="the same from a file")
    group.add_argument("--chat", action="store_true", help="make each prompt one user message")
    group.add_argument(
        "--task",
        choices=("generate", "loglikelihood"),
        default="generate",
        help="loglikelihood scores each row's `continuation` instead of writing one (default: generate)",
    )
    texts = group.add_mutually_exclusive_group()
    texts.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")
    texts.add_argument("--system-file", metavar="FILE", help="the same from a file")
    group.add_argument(
        "--keep", type=_keep, default="all", metavar="all|none|a,b", help="columns of the input in OUT (default: all)"
    )
    group.add_argument("--output-column", default="output", metavar="NAME", help="of the text (default: output)")
    group.add_argument("--output-prefix", default="", metavar="TEXT", help="before the names of the result's columns")


def _keep(text: str) -> str | list[str]:
    return text if text in ("all", "none") else text.split(",")


def _text(text: str | None, file: str | None) -> str | None:
    """What was given, or what the file holds, without the line break at its end. Raises OSError, ValueError."""
    if file is None:
        return text
    with open(file, encoding="utf-8", newline="") as stream:
        return stream.read().removesuffix("\n").removesuffix("\r")


def _shard(text: str) -> tuple[int, int]:
    number, _, num_shards = text.partition("/")
    return int(number), int(num_shards)


def _max_failed(text: str) -> int | float:
    return float(text[:-1]) / 100 if text.endswith("%") else int(text)


_shard.__name__, _max_failed.__name__ = "I/N", "N or P%"  # argparse names them: invalid I/N value: 'x'


def run_command(args: argparse.Namespace) -> int:
    from pagedllm.jobs.opening import open_job

    sampling = flags.sampling_arguments(args)
    with contextlib.ExitStack() as stack:
        try:
            llm_arguments = flags.llm_arguments(args)
            job = stack.enter_context(
                open_job(
                    args.input,
                    args.output,
                    config=EngineConfig(**llm_arguments),
                    sampling_params=sampling,
                    if_exists=args.if_exists,
                    retry=args.retry,
                    limit=args.limit,
                    shard=args.shard,
                    order=args.order,
                    max_failed=args.max_failed,
                    report=args.report,
                    report_text=args.report_text,
                    task=args.task,
                    template=_text(args.template, args.template_file),
                    chat=args.chat,
                    system=_text(args.system, args.system_file),
                    keep=args.keep,
                    output_column=args.output_column,
                    output_prefix=args.output_prefix,
                )
            )
        except (PagedLLMError, ValueError, OSError) as error:
            return complain(error, REFUSED)
        if job.is_done:
            if not args.quiet:
                print(f"pagedllm: nothing to do: {args.output} has all {job.report.num_rows:,} rows", file=sys.stderr)
            return DONE if job.allows_failures() else ROWS_FAILED
        try:
            return run_job(job, llm_arguments, args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: Python's exit must not care
            return FAILED
        except (OSError, PagedLLMError) as error:
            code = complain(error, FAILED)
        except (KeyboardInterrupt, Terminated) as interrupt:
            code = complain_of(interrupt)
        tell_how_to_continue(job, args.argv)
        return code


def run_job(job: Job, llm_arguments: dict[str, Any], args: argparse.Namespace) -> int:
    """Loads the model and runs the job; returns the exit code."""
    from pagedllm.jobs.formats import JobRefused
    from pagedllm.jobs.progress import JobProgress, summary
    from pagedllm.jobs.runner import TooManyFailures
    from pagedllm.llm import LLM

    try:
        llm = LLM(**llm_arguments)
    except LibraryError as error:
        return complain(error, FAILED)
    except (PagedLLMError, ValueError, FileNotFoundError) as error:
        return complain(error, REFUSED)
    num_rows = None if args.quiet and args.max_failed is None else job.count_rows()
    with llm, contextlib.closing(JobProgress(num_rows, args.quiet)) as progress:
        try:
            if args.dry_run:
                print(llm.plan_job(job).text(), file=sys.stderr)
                return DONE
            report = llm.run_job(job, progress.show, None if args.quiet else progress.tell_plan)
        except (JobRefused, RequestError, FileExistsError) as error:
            return complain(error, REFUSED)
        except TooManyFailures as error:
            complain(error, ROWS_FAILED)
            tell_how_to_continue(job, args.argv)
            return ROWS_FAILED
    if not args.quiet:
        print(summary(report), file=sys.stderr)
    if report.num_failed and args.quiet:
        complain(f"{report.num_failed:,} of {report.num_rows:,} rows failed; {report.first_error}", ROWS_FAILED)
    return DONE if job.allows_failures() else ROWS_FAILED


def bench_command(args: argparse.Namespace) -> int:
    from pagedllm.bench.cli import run

    try:
        return run(args)
    except PagedLLMError as error:
        return complain(error, FAILED)


def tell_how_to_continue(job: Job, argv: Sequence[str]) -> None:
    """The last line of a run that did not finish is the command that continues it."""
    if job.partial is None:
        print("pagedllm: nothing is kept of this run; this starts it again:", file=sys.stderr)
        print(f"pagedllm {shlex.join(argv)}", file=sys.stderr)
        return
    print(f"pagedllm: {job.num_written:,} results are in {job.partial}; this continues:", file=sys.stderr)
    print(f"pagedllm {shlex.join(continuing(argv))}", file=sys.stderr)


def continuing(argv: Sequence[str]) -> list[str]:
    """The same command without its --if-exists, so that it resumes."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name.replace("_", "-") != "--if-exists":
            kept.append(argument)
        elif not equals:
            next(arguments, None)
    return kept


@contextlib.contextmanager
def log_on_stderr(is_quiet: bool) -> Iterator[None]:
    """Notices, and unless quiet what the engine tells of itself, as lines of stderr."""
    logger = logging.getLogger("pagedllm")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pagedllm: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if is_quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM raises Terminated in the block, once: the second one ends the process."""

    def raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
