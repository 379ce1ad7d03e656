"""Each kernel alone, at a model's shapes, beside the least time that its bytes and its operations take here.

The byte floor is bytes / the read bandwidth of a 270 MB buffer, the flop floor is operations / the best rate that any
product reached; both are measured in the same run, so that a share says how far a kernel is from this machine, now.
Weights and keys come from memory, as in a step; rows are few and may stay in a cache: their shares can exceed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagedllm.bench.model_layers import (
    bandwidth_buffer,
    make_head,
    make_layer_linears,
    num_copies,
    read_bandwidth,
    time_rounds,
)
from pagedllm.bench.workloads import SAMPLED, Sampling
from pagedllm.model.config import ModelConfig
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionShape
from pagedllm.ops.norm import add_rms_norm, rms_norm
from pagedllm.ops.sampling import sample
from pagedllm.runtime.device import torch_threads

LINEAR_ROWS = (1, 8, 32, 128, 512)
NORM_ROWS = (1, 128, 512)
SAMPLED_ROWS = 128
# (sequences, new tokens of each, keys of each, new ones included)
ATTENTION_BATCHES = ((128, 1, 96), (128, 1, 512), (1, 1, 4096), (1, 512, 512), (1, 512, 2048))
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelResult:
    kernel: str
    shape: str
    seconds: float
    bytes: int  # that must move at least
    flops: float
    floor_seconds: float = 0.0  # the greater of the byte floor and the flop floor
    floor: str = ""  # "bytes" or "flops": which one that is

    @property
    def share(self) -> float:
        """Of what the machine allows."""
        return self.floor_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class KernelReport:
    read_gbytes: float  # GB/s of a 270 MB buffer
    peak_gflops: float  # of the best product
    kernels: list[KernelResult]


def measure_kernels(
    config: ModelConfig,
    dtype: torch.dtype,
    backend: AttentionBackend,
    num_threads: int,
    *,
    at_least: float = 0.1,
) -> KernelReport:
    """at_least: seconds that each kernel is run for."""
    with torch_threads(num_threads), torch.inference_mode():
        buffer = bandwidth_buffer()
        bandwidth = read_bandwidth(buffer)
        results = [
            *_measure_linears(config, dtype, backend.namespace, at_least),
            *(measure_attention(config, dtype, backend, *batch, at_least) for batch in ATTENTION_BATCHES),
            *_measure_norms(config, dtype, backend.namespace, at_least),
            _measure_sampling(config, backend.namespace, "sample greedy", None, at_least),
            _measure_sampling(config, backend.namespace, "sample 0.8/0.95/50", SAMPLED, at_least),
        ]
        bandwidth = max(bandwidth, read_bandwidth(buffer))
    peak = max(result.flops / result.seconds for result in results if result.kernel.startswith("linear"))
    return KernelReport(bandwidth / 1e9, peak / 1e9, [with_floor(result, bandwidth, peak) for result in results])


def with_floor(result: KernelResult, bandwidth: float, peak: float) -> KernelResult:
    """bandwidth: bytes/s; peak: FLOP/s."""
    by_bytes, by_flops = result.bytes / bandwidth, result.flops / peak
    floor = "bytes" if by_bytes >= by_flops else "flops"
    return replace(result, floor_seconds=max(by_bytes, by_flops), floor=floor)


def _measure_linears(
    config: ModelConfig, dtype: torch.dtype, namespace: str, at_least: float
) -> Iterator[KernelResult]:
    linears = {**make_layer_linears(config, dtype, namespace), "head": make_head(config, dtype, namespace)}
    for name, linear in linears.items():
        shape = linear.product.shape
        for num_rows in LINEAR_ROWS:
            yield KernelResult(
                f"linear {name}",
                f"{shape.in_features} x {sum(shape.part_sizes)}, M={num_rows}",
                linear.seconds(num_rows, at_least),
                linear.bytes(num_rows),
                linear.flops(num_rows),
            )
        linear.close()


def measure_attention(
    config: ModelConfig,
    dtype: torch.dtype,
    backend: AttentionBackend,
    num_seqs: int,
    num_new: int,
    num_keys: int,
    at_least: float,
) -> KernelResult:
    """The first layer's attention of num_seqs sequences, each num_new tokens at the end of num_keys keys of its own."""
    shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
    blocks_per_seq = -(-num_keys // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    spec = backend.kv_cache_spec(num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype)
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.empty(size, dtype=dtype, device="cpu").normal_(generator=generator)
        for size in (spec.k_shape, spec.v_shape)
    )
    kv_caches = [(k.clone(), v.clone()) for _ in range(num_copies(k.nbytes + v.nbytes))]
    tables = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(num_seqs, blocks_per_seq)
    q_lens, seq_lens = np.full(num_seqs, num_new, np.int32), np.full(num_seqs, num_keys, np.int32)
    plan = backend.plan(q_lens, seq_lens, shape)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(0, num_seqs * num_new + 1, num_new, dtype=torch.int32),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=(tables,),
        slot_mappings=(),
        work=torch.from_numpy(plan.work),
        merge=torch.from_numpy(plan.merge),
        workspace=torch.empty(plan.workspace_size, dtype=torch.float32, device="cpu"),
    )
    q = torch.randn(num_seqs * num_new, shape.num_q_heads, shape.head_dim, generator=generator).to(dtype)
    out = torch.empty_like(q)
    kind = config.layers[0].attention

    def run() -> None:
        for kv_cache in kv_caches:
            backend.attend(out, q, kv_cache, metadata, 0, None, config.attention_scale, kind.softcap, kind.window)

    num_seen = num_seqs * sum(_num_seen(num_keys - num_new + 1 + i, kind.window) for i in range(num_new))
    num_read = min(num_keys, kind.window + num_new - 1) if kind.window else num_keys
    return KernelResult(
        "attention",
        f"{num_seqs} x {num_new} new, {num_keys} keys",
        time_rounds(run, at_least) / len(kv_caches),
        2 * num_seqs * num_read * shape.num_kv_heads * shape.head_dim * dtype.itemsize + 2 * q.nbytes,
        4.0 * num_seen * shape.num_q_heads * shape.head_dim,
    )


def _num_seen(num_keys: int, window: int) -> int:
    return min(num_keys, window) if window else num_keys


def _measure_norms(config: ModelConfig, dtype: torch.dtype, namespace: str, at_least: float) -> Iterator[KernelResult]:
    weight = torch.ones(config.hidden_size, dtype=torch.float32, device="cpu")
    for num_rows in NORM_ROWS:
        x, out, residual = (torch.ones(num_rows, config.hidden_size, dtype=dtype, device="cpu") for _ in range(3))
        for name, num_passes, run in _norms(namespace, x, out, residual, weight, config.norm_eps):
            flops = 4.0 * x.numel()
            yield KernelResult(name, f"{num_rows} rows", time_rounds(run, at_least), num_passes * x.nbytes, flops)


def _norms(
    namespace: str, x: Tensor, out: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Sequence[tuple[str, int, Callable[[], None]]]:
    """(name, tensors read or written, call)."""
    return (
        ("rms_norm", 2, lambda: rms_norm(namespace, out, x, weight, eps)),
        ("add_rms_norm", 4, lambda: add_rms_norm(namespace, out, residual, x, weight, eps)),
    )


def _measure_sampling(
    config: ModelConfig, namespace: str, name: str, sampling: Sampling | None, at_least: float
) -> KernelResult:
    """One draw for each of SAMPLED_ROWS rows of logits that are spread as a language model's are, roughly."""
    num_rows = SAMPLED_ROWS
    logits = torch.randn(num_rows, config.vocab_size, generator=torch.Generator().manual_seed(0)).mul_(3)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device="cpu")
    temperature, top_p, min_p = (
        torch.full((num_rows,), value, dtype=torch.float32, device="cpu")
        for value in ((0.0, 1.0, 0.0) if sampling is None else (sampling.temperature, sampling.top_p, 0.0))
    )
    top_k = torch.full((num_rows,), 0 if sampling is None else sampling.top_k, dtype=torch.int32, device="cpu")
    seed = torch.arange(num_rows, dtype=torch.int64)
    counter = torch.zeros(num_rows, 2, dtype=torch.int32, device="cpu")

    def run() -> None:
        sample(namespace, token_ids, logits, temperature, top_k, top_p, min_p, seed, counter)

    seconds = time_rounds(run, at_least)
    return KernelResult(name, f"{num_rows} x {config.vocab_size}", seconds, logits.nbytes, float(logits.numel()))
