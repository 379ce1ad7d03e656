"""`pagedllm bench`: the command line of the benchmarks.

Results go to stdout, as text or with --json as one object; exit code 0, 1 where an engine failed, 2 for wrong
arguments. `pagedllm.cli` adds these parsers to its own and calls `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from pathlib import Path
from typing import Any

from pagedllm.bench.workloads import WORKLOADS

DEFAULT_KV_CACHE_BYTES = 4 << 30
PEERS = ("openvino",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmarks as subcommands of `parser`."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    throughput = benchmarks.add_parser(
        "throughput",
        help="output tokens per second of a whole call, beside other engines",
        description="Generates a fixed workload (token ids by fixed seed, exact output lengths, greedy) and prints the "
        "output tokens per second of the whole call, loading excluded. Peers run in turn, on the same ids.",
    )
    throughput.add_argument("-m", "--model", required=True, help="model folder or GGUF file")
    throughput.add_argument("--workload", choices=sorted(WORKLOADS), default="mixed", help="default: mixed")
    throughput.add_argument("--num-requests", type=_positive, default=128, metavar="N", help="default: 128")
    throughput.add_argument("--repeat", type=_positive, default=1, metavar="K", help="repetitions, each with new ids")
    throughput.add_argument("--compare", action="append", choices=PEERS, default=[], help="a peer to measure too")
    throughput.add_argument("--openvino-python", metavar="PATH", help="a Python that has openvino-genai")
    throughput.add_argument("--openvino-model", metavar="DIR", help="the same model, exported by optimum-cli")
    throughput.add_argument("--dtype", default="auto", help="of pagedllm: auto, bfloat16, float32")
    throughput.add_argument("--kernels", default="auto", help="of pagedllm")
    throughput.add_argument("--num-threads", type=_positive, metavar="N", help="of every engine; default: all CPUs")
    throughput.add_argument(
        "--kv-cache-memory-bytes",
        type=_positive,
        default=DEFAULT_KV_CACHE_BYTES,
        metavar="N",
        help="of every engine; default: 4 GiB",
    )
    throughput.add_argument("--json", action="store_true", help="print one JSON object")
    throughput.set_defaults(run_benchmark=run_throughput, parser=throughput)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that `args` names; returns the exit code."""
    code: int = args.run_benchmark(args)
    return code


def run_throughput(args: argparse.Namespace) -> int:
    if "openvino" in args.compare and not (args.openvino_python and args.openvino_model):
        args.parser.error("--compare openvino needs --openvino-python PATH and --openvino-model DIR")
    from pagedllm import LLM
    from pagedllm.bench.peers import open_openvino
    from pagedllm.bench.throughput import MeasuredEngine, OwnEngine, measure_throughput
    from pagedllm.runtime.device import read_thread_limits

    num_threads = args.num_threads or read_thread_limits().num_threads
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(
                open_openvino(args.openvino_python, args.openvino_model, num_threads, args.kv_cache_memory_bytes)
            )
            for _ in args.compare
        ]
        llm = stack.enter_context(
            LLM(
                args.model,
                dtype=args.dtype,
                kernels=args.kernels,
                num_threads=num_threads,
                kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            )
        )
        engines: list[MeasuredEngine] = [OwnEngine(llm), *peers]
        report = measure_throughput(engines, args.workload, args.num_requests, llm.vocab_size, args.repeat)
    facts = {
        "model": args.model,
        "cpu": read_cpu_name(),
        "num_threads": num_threads,
        **report.to_dict(),
    }
    print(json.dumps(facts) if args.json else format_report(facts))
    return 0


def format_report(facts: dict[str, Any]) -> str:
    """The facts as a few lines of text."""
    repetitions = len(facts["engines"][0]["tokens_per_second"])
    lines = [
        f"{facts['workload']}: {facts['num_requests']} requests, {facts['num_prompt_tokens']:,} prompt tokens, "
        f"{facts['num_output_tokens']:,} output tokens; {facts['cpu']}, {facts['num_threads']} threads",
        f"{'engine':<28}{'output tokens/s':>16}{'pagedllm is':>14}   (median of {repetitions})",
    ]
    for engine in facts["engines"]:
        ratio = "" if engine["ratio"] is None else f"{engine['ratio']:.2f} x"
        lines.append(f"{engine['engine']:<28}{engine['median']:>16,.1f}{ratio:>14}")
        if engine["kv_waste"] is not None:
            lines.append(f"{'':<4}KV waste {engine['kv_waste']:.2%} of the allocated slots, summed over the steps")
    return "\n".join(lines)


def read_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as Linux tells it, else the machine type."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
