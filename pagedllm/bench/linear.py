"""`python -m pagedllm.bench.linear`: the packed product beside torch's `F.linear`, in turns, weights from memory.

Shapes are those of SmolLM2-135M and of Llama 3.2 1B. Before each turn everything rests: torch's OpenMP threads spin for
some milliseconds after their work, on cores that the other side would lack. For an instruction set below the machine's,
hold torch to it as well:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
        python -m pagedllm.bench.linear --kernels avx2 --dtype float32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.backends.cpu import get_cpu_capability
from torch.nn.functional import linear

from pagedllm.bench.model_layers import LayerProduct, TimedLinear, num_copies, time_rounds
from pagedllm.model.linear import LinearShape
from pagedllm.ops.library import load_kernels
from pagedllm.ops.linear import Activation
from pagedllm.runtime.device import read_thread_limits, torch_threads

SHAPES = ((576, 3072), (1536, 576), (576, 49152), (2048, 16384), (8192, 2048))  # K, N
NUM_ROWS = (1, 8, 32, 128, 512)
REST_SECONDS = 0.03


def torch_seconds(weights: list[Tensor], num_rows: int) -> float:
    """Of one call of F.linear, going through the weights [N, K]."""
    x = torch.randn(num_rows, weights[0].shape[1]).to(weights[0].dtype)
    return time_rounds(lambda: [linear(x, weight) for weight in weights], 0) / len(weights)


def compare(shape: LinearShape, dtype: torch.dtype, namespace: str, rows: Sequence[int], num_turns: int) -> None:
    """Prints a line for each number of rows: GFLOP/s of the fastest of all turns."""
    ours = TimedLinear(LayerProduct(shape, 1), Activation.NONE, dtype, namespace, dtype)
    first = torch.randn(shape.out_features, shape.in_features).to(dtype)
    weights = [first.clone() for _ in range(num_copies(first.nbytes))]
    for num_rows in rows:
        ours_best = torch_best = float("inf")
        for _ in range(num_turns):
            time.sleep(REST_SECONDS)
            ours_best = min(ours_best, ours.seconds(num_rows, 0))
            time.sleep(REST_SECONDS)
            torch_best = min(torch_best, torch_seconds(weights, num_rows))
        rates = [ours.flops(num_rows) / seconds / 1e9 for seconds in (ours_best, torch_best)]
        name = f"{shape.in_features} x {shape.out_features}"
        print(f"{name:<14}{num_rows:>6}{rates[0]:>10,.0f}{rates[1]:>10,.0f}{rates[0] / rates[1]:>8.2f}", flush=True)
    ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto", help="as of LLM")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=read_thread_limits().num_threads)
    parser.add_argument("--num-rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--num-turns", type=int, default=3)
    args = parser.parse_args()
    kernels = load_kernels(args.kernels)
    print(f"{kernels.name}, {args.dtype}, {args.num_threads} threads; torch is held to {get_cpu_capability()}")
    print(f"{'K x N':<14}{'M':>6}{'GFLOP/s':>10}{'F.linear':>10}{'ratio':>8}")
    with torch_threads(args.num_threads), torch.inference_mode():
        for in_features, out_features in SHAPES:
            shape = LinearShape(in_features, (out_features,))
            compare(shape, getattr(torch, args.dtype), kernels.namespace, args.num_rows, args.num_turns)


if __name__ == "__main__":
    main()
