"""`pagedllm bench`: the command line of the benchmarks.

Results go to stdout, as text or with --json as one object; exit code 0, 1 where an engine failed, 2 for wrong
arguments. `pagedllm.cli` adds these parsers to its own and calls `run`; `report.py` turns results into text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.bench.peers import PEERS, open_peer
from pagedllm.bench.random_model import SHAPES, write_random_model
from pagedllm.bench.report import format_host, format_kernels, format_throughput
from pagedllm.bench.workloads import WORKLOADS, is_workload

if TYPE_CHECKING:
    import torch

    from pagedllm.bench.model_layers import ModelCost
    from pagedllm.model.config import ModelConfig

DEFAULT_KV_CACHE_BYTES = 4 << 30
LINEAR_ROWS = 512
SECONDS_A_PRODUCT = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmarks as subcommands of `parser`."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    _add_throughput(benchmarks)
    kernels = benchmarks.add_parser(
        "kernels",
        help="each kernel at a model's shapes, beside its byte and flop floors",
        description="Times packed products, attention, norms and sampling at the model's shapes, and what their bytes "
        "and operations take at least by the read bandwidth and the best rate of the same run. Loads no weights.",
    )
    _add_model_arguments(kernels)
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    kernels.set_defaults(run_benchmark=run_kernels, parser=kernels)
    host = benchmarks.add_parser(
        "host",
        help="time of a step outside the model",
        description="Steps of the real engine around a model that computes nothing, at 1 to 1,024 running requests.",
    )
    host.add_argument("--num-running", type=_positive, nargs="+", metavar="N", help="default: 1 64 128 256 1024")
    host.add_argument("--num-waiting", type=_not_negative, default=0, metavar="N", help="default: 0")
    host.add_argument("--kernels", default="auto", help="as of LLM")
    host.add_argument("--num-threads", type=_positive, metavar="N", help="default: all CPUs")
    host.add_argument("--json", action="store_true", help="print one JSON object")
    host.set_defaults(run_benchmark=run_host, parser=host)
    random_model = benchmarks.add_parser(
        "random-model",
        help="write a model of random weights to measure",
        description="Writes a model of random weights in bfloat16, and a tokenizer of bytes, which every engine reads.",
    )
    random_model.add_argument("shape", choices=sorted(SHAPES), help="of the layers")
    random_model.add_argument("folder", type=Path, help="which is made")
    random_model.set_defaults(run_benchmark=run_random_model, parser=random_model)


def _add_throughput(benchmarks: Any) -> None:
    throughput = benchmarks.add_parser(
        "throughput",
        help="output tokens per second of a whole call, beside other engines",
        description="Generates a fixed workload (token ids by fixed seed, exact output lengths) and prints the output "
        "tokens per second of the whole call, loading excluded. Peers run in turn, on the same ids, each in a Python "
        "of its own. `sampled` draws at temperature 0.8, top_p 0.95, top_k 50, and runs ours once more greedily.",
    )
    _add_model_arguments(throughput)
    throughput.add_argument(
        "--workload",
        type=_workload,
        default="mixed",
        metavar="NAME",
        help=f"{', '.join(sorted(WORKLOADS))}, or IN,OUT: tokens of each prompt and each output; default: mixed",
    )
    throughput.add_argument("--num-requests", type=_positive, default=128, metavar="N", help="default: 128")
    throughput.add_argument("--repeat", type=_positive, default=1, metavar="K", help="repetitions, each with new ids")
    throughput.add_argument(
        "--second-call", action="store_true", help="run each repetition's ids again: prefix caches across calls"
    )
    throughput.add_argument(
        "--compare",
        action="extend",
        type=_peers,
        default=[],
        metavar="PEER,...",
        help=f"peers to measure too: {', '.join(PEERS)}",
    )
    for name, kind in PEERS.items():
        default = "default: --model" if kind.takes_our_model else "needed by it"
        throughput.add_argument(f"--{_flag(name)}-python", metavar="PATH", help=f"a Python that has {name}")
        throughput.add_argument(f"--{_flag(name)}-model", metavar="PATH", help=f"{kind.model_form}; {default}")
    throughput.add_argument(
        "--kv-cache-memory-bytes",
        type=_positive,
        default=DEFAULT_KV_CACHE_BYTES,
        metavar="N",
        help="of every engine; default: 4 GiB",
    )
    throughput.add_argument("--json", action="store_true", help="print one JSON object")
    throughput.set_defaults(run_benchmark=run_throughput, parser=throughput)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", required=True, help="model folder or GGUF file")
    parser.add_argument("--dtype", default="auto", help="of pagedllm: auto, bfloat16, float32")
    parser.add_argument("--kernels", default="auto", help="of pagedllm, as of LLM")
    parser.add_argument("--num-threads", type=_positive, metavar="N", help="of every engine; default: all CPUs")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that `args` names; returns the exit code."""
    code: int = args.run_benchmark(args)
    return code


def run_throughput(args: argparse.Namespace) -> int:
    _check_throughput(args)
    from pagedllm import LLM
    from pagedllm.bench.throughput import MeasuredEngine, OwnEngine, measure_throughput

    num_threads = _num_threads(args)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_open_peer(name, args, num_threads)) for name in args.compare]
        llm = stack.enter_context(
            LLM(
                args.model,
                dtype=args.dtype,
                kernels=args.kernels,
                num_threads=num_threads,
                kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            )
        )
        cost, measure_machine = _machine(args, num_threads)
        engines: list[MeasuredEngine] = [OwnEngine(llm, cost, measure_machine)]
        if args.workload == "sampled":
            engines.append(OwnEngine(llm, cost, measure_machine, is_greedy=True))
        report = measure_throughput(
            [*engines, *peers],
            args.workload,
            args.num_requests,
            llm.vocab_size,
            args.repeat,
            has_second_call=args.second_call,
        )
    _print(args, {**_place(args, num_threads), **report.to_dict()}, format_throughput)
    return 0


def run_kernels(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pagedllm.bench.kernels import measure_kernels
    from pagedllm.ops.attention import CpuAttentionBackend
    from pagedllm.ops.library import load_kernels

    num_threads = _num_threads(args)
    config, dtype = _read_model(args)
    kernels = load_kernels(args.kernels)
    report = measure_kernels(config, dtype, CpuAttentionBackend(kernels.namespace), num_threads)
    facts = {
        **_place(args, num_threads),
        "kernel_set": kernels.name,
        "dtype": str(dtype).removeprefix("torch."),
        "read_gbytes": report.read_gbytes,
        "peak_gflops": report.peak_gflops,
        "kernels": [{**asdict(result), "share": result.share} for result in report.kernels],
    }
    _print(args, facts, format_kernels)
    return 0


def run_host(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pagedllm.bench.host import NUM_RUNNING, measure_host
    from pagedllm.ops.library import load_kernels

    num_threads = _num_threads(args)
    namespace = load_kernels(args.kernels).namespace
    results = [
        measure_host(num_running, args.num_waiting, namespace, num_threads)
        for num_running in args.num_running or NUM_RUNNING
    ]
    facts = {"cpu": read_cpu_name(), "num_threads": num_threads, "steps": [asdict(result) for result in results]}
    _print(args, facts, format_host)
    return 0


def run_random_model(args: argparse.Namespace) -> int:
    try:
        write_random_model(args.shape, args.folder)
    except FileExistsError as error:
        args.parser.error(str(error))
    print(args.folder)
    return 0


def _check_throughput(args: argparse.Namespace) -> None:
    """Ends with exit code 2, before anything is loaded, where the arguments do not fit together."""
    for name in args.compare:
        kind, flag = PEERS[name], _flag(name)
        model = "" if kind.takes_our_model else f" and --{flag}-model PATH"
        if not _of_peer(args, name, "python") or (model and not _of_peer(args, name, "model")):
            args.parser.error(f"--compare {name} needs --{flag}-python PATH{model}")
        if not kind.has_batches and args.num_requests > 1:
            args.parser.error(
                f"--compare {name} needs --num-requests 1, got {args.num_requests}: its Python interface runs one "
                "request at a time"
            )
    if args.second_call and args.workload == "sampled":
        args.parser.error("--second-call is not for --workload sampled, whose ids ours runs twice anyway")


def _open_peer(name: str, args: argparse.Namespace, num_threads: int) -> Any:
    model = _of_peer(args, name, "model") or args.model
    return open_peer(name, _of_peer(args, name, "python"), model, num_threads, args.kv_cache_memory_bytes)


def _of_peer(args: argparse.Namespace, name: str, what: str) -> Any:
    return getattr(args, f"{_flag(name)}_{what}".replace("-", "_"))


def _machine(args: argparse.Namespace, num_threads: int) -> tuple[ModelCost, Callable[[], tuple[float, float]]]:
    """What a token of this model costs, and a measurement of our products (FLOP/s) and of memory (bytes/s)."""
    from pagedllm.bench.model_layers import (
        ModelCost,
        bandwidth_buffer,
        linear_flops_rate,
        make_layer_linears,
        read_bandwidth,
    )
    from pagedllm.ops.library import load_kernels
    from pagedllm.runtime.device import torch_threads

    config, dtype = _read_model(args)
    linears = make_layer_linears(config, dtype, load_kernels(args.kernels).namespace)
    buffer = bandwidth_buffer()

    def measure() -> tuple[float, float]:
        with torch_threads(num_threads):
            return linear_flops_rate(linears, LINEAR_ROWS, SECONDS_A_PRODUCT), read_bandwidth(buffer)

    return ModelCost.of(config, dtype), measure


def _read_model(args: argparse.Namespace) -> tuple[ModelConfig, torch.dtype]:
    from pagedllm.model.loader import open_checkpoint
    from pagedllm.model.registry import read_model_config
    from pagedllm.runtime.resolve import resolve_dtype

    dtype = resolve_dtype(args.dtype)
    checkpoint = open_checkpoint(args.model, dtype=dtype)
    return read_model_config(checkpoint.config, checkpoint.path), dtype


def _num_threads(args: argparse.Namespace) -> int:
    from pagedllm.runtime.device import read_thread_limits

    return args.num_threads or read_thread_limits().num_threads


def _place(args: argparse.Namespace, num_threads: int) -> dict[str, Any]:
    return {"model": args.model, "cpu": read_cpu_name(), "num_threads": num_threads}


def _print(args: argparse.Namespace, facts: dict[str, Any], to_text: Callable[[dict[str, Any]], str]) -> None:
    print(json.dumps(facts) if args.json else to_text(facts))


def read_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as Linux tells it, else the machine type."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _flag(peer: str) -> str:
    return peer.replace(".", "-")


def _workload(text: str) -> str:
    if not is_workload(text):
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(sorted(WORKLOADS))}, or IN,OUT, got {text!r}")
    return text


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"knows {', '.join(PEERS)}, got {name!r}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value
