"""The commands on files of jobs that need no model: `status`, `export`, `merge`. Each gives its exit code."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pagedllm.errors import PagedLLMError
from pagedllm.exit_codes import DONE, REFUSED, complain


def add_parsers(commands: Any) -> None:
    """commands: what `add_subparsers` gave."""
    status = commands.add_parser("status", help="how far a job is")
    status.add_argument("output", metavar="OUT")
    status.set_defaults(command=status_command)
    export = commands.add_parser(
        "export", help="write the results that a job has by now, finished or not, into another kind of file"
    )
    export.add_argument("output", metavar="OUT")
    export.add_argument("-o", "--to", required=True, metavar="FILE", help=".jsonl, .jsonl.gz, .csv, .tsv or .parquet")
    export.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    export.set_defaults(command=export_command)
    merge = commands.add_parser("merge", help="join the results of all shards of a job, in the order of its rows")
    merge.add_argument("shards", nargs="+", metavar="SHARD")
    merge.add_argument("-o", "--output", required=True, metavar="OUT")
    merge.set_defaults(command=merge_command)


def status_command(args: argparse.Namespace) -> int:
    from pagedllm.jobs.tools import describe_job

    try:
        print(describe_job(args.output))
    except (OSError, ValueError) as error:
        return complain(error, REFUSED)
    return DONE


def export_command(args: argparse.Namespace) -> int:
    from pagedllm.jobs.export import export_results

    try:
        num_rows = export_results(args.output, args.to, overwrite=args.overwrite)
    except (OSError, ValueError, PagedLLMError) as error:
        return complain(error, REFUSED)
    print(f"pagedllm: {num_rows:,} rows in {args.to}", file=sys.stderr)
    return DONE


def merge_command(args: argparse.Namespace) -> int:
    from pagedllm.jobs.tools import merge_shards

    try:
        num_rows = merge_shards(args.shards, args.output)
    except (OSError, ValueError) as error:
        return complain(error, REFUSED)
    print(f"pagedllm: {num_rows:,} rows in {args.output}", file=sys.stderr)
    return DONE
