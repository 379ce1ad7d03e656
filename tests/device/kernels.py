"""Stage 5: what this card can do, and what the attention kernels make of it. Every figure is the median of graphs that
hold calls over other keys each, so that neither Python nor a cache is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pagedllm.ops.attention import AttentionMetadata, AttentionShape
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from tests.device.results import DECODE_ATTENTION, PREFILL_ATTENTION, Budget, Results
from tests.device.target import Target

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
MAX_CALLS = 8  # in a graph
GB, GIB = 1e9, 1 << 30


@dataclass(frozen=True)
class Ceilings:
    bandwidth: float  # bytes/s, those read and those written
    peak: float  # FLOP/s of bfloat16 products


def run(target: Target, results: Results, budget: Budget) -> None:
    target.load()
    with torch.inference_mode():
        ceilings = measure_ceilings(target)
        results.figure("copy bandwidth", ceilings.bandwidth / GB, "GB/s", note="bytes read and written")
        size = target.sizes.matmul
        results.figure("bfloat16 product", ceilings.peak / 1e12, "TFLOP/s", note=f"{size} x {size} x {size}")
        keys = Keys(target, results)
        for case in cases(target):
            measure_attention(target, results, budget, ceilings, keys, case)


def measure_ceilings(target: Target) -> Ceilings:
    """Of this card, now: random values, since zeros multiply faster."""
    return Ceilings(measure_copy(target), measure_product(target))


def measure_copy(target: Target) -> float:
    source = torch.empty(target.sizes.copy_bytes // 2, dtype=DTYPE, device=target.device).normal_()
    copy = torch.empty_like(source)
    return 2 * source.nbytes / target.median_captured(lambda: copy.copy_(source))


def measure_product(target: Target) -> float:
    size = target.sizes.matmul
    a, b = (torch.empty(size, size, dtype=DTYPE, device=target.device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / target.median_captured(lambda: torch.mm(a, b, out=out))


@dataclass(frozen=True)
class Case:
    num_seqs: int
    num_new: int  # of each sequence
    num_keys: int  # of each sequence, new ones included
    shape: AttentionShape
    deterministic: bool = True

    @property
    def name(self) -> str:
        s = self.shape
        kind = f"{self.num_new} new of {self.num_keys}" if self.num_new > 1 else f"{self.num_keys} keys"
        free = "" if self.deterministic else ", deterministic=False"
        group = f"GQA {s.num_q_heads // s.num_kv_heads}"
        label = "decode" if self.num_new == 1 else "prefill"
        return f"{label} attention, {self.num_seqs} x {kind}, head_dim {s.head_dim}, {group}{free}"

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.num_keys // BLOCK_SIZE)

    @property
    def cache_elements(self) -> int:
        """Of K, and of V."""
        return self.num_seqs * self.blocks_per_seq * BLOCK_SIZE * self.shape.num_kv_heads * self.shape.head_dim

    @property
    def flops(self) -> float:
        first = self.num_keys - self.num_new + 1
        pairs = self.num_new * (first + self.num_keys) / 2
        return 4.0 * self.num_seqs * pairs * self.shape.num_q_heads * self.shape.head_dim

    @property
    def num_bytes(self) -> int:
        """Keys and values once; queries in, outputs out."""
        s = self.shape
        keys = 2 * self.num_seqs * self.num_keys * s.num_kv_heads * s.head_dim
        rows = 2 * self.num_seqs * self.num_new * s.num_q_heads * s.head_dim
        return (keys + rows) * DTYPE.itemsize


def cases(target: Target) -> Iterator[Case]:
    """What matters most first: the rest may be cut."""
    sizes = target.sizes
    for num_seqs, num_new, num_keys in sizes.prefills:
        for head_dim in reversed(sizes.head_dims):
            case = Case(num_seqs, num_new, num_keys, AttentionShape(*sizes.prefill_heads, head_dim))
            yield case
            if head_dim == sizes.head_dims[-1]:
                yield replace(case, deterministic=False)
    for group, head_dim in product(reversed(sizes.groups), reversed(sizes.head_dims)):
        for num_keys, num_seqs in product(sizes.decode_contexts, sizes.decode_batches):
            yield Case(num_seqs, 1, num_keys, AttentionShape(sizes.kv_heads * group, sizes.kv_heads, head_dim))


class Keys:
    """Random K and V values, one pool for all cases."""

    def __init__(self, target: Target, results: Results) -> None:
        free = target.gpu().memory().free
        num_bytes = min(target.sizes.kv_bytes, free * 7 // 10)
        if num_bytes < target.sizes.kv_bytes:
            results.cut("pool of keys", f"{num_bytes / GIB:.1f} GiB instead of {target.sizes.kv_bytes / GIB:.1f}")
        half = num_bytes // 2 // DTYPE.itemsize
        self._k, self._v = (torch.empty(half, dtype=DTYPE, device=target.device).normal_() for _ in range(2))

    def num_calls(self, case: Case) -> int:
        """That find other keys each; 0 where there is no room for one."""
        return min(MAX_CALLS, len(self._k) // case.cache_elements)

    def part(self, case: Case, index: int) -> tuple[Tensor, Tensor]:
        """[num_blocks, kv_heads, block_size, head_dim] each."""
        begin = index * case.cache_elements
        shape = (-1, case.shape.num_kv_heads, BLOCK_SIZE, case.shape.head_dim)
        k, v = (values[begin : begin + case.cache_elements].view(shape) for values in (self._k, self._v))
        return k, v


def measure_attention(
    target: Target, results: Results, budget: Budget, ceilings: Ceilings, keys: Keys, case: Case
) -> None:
    num_calls = keys.num_calls(case)
    if num_calls == 0:
        results.cut(case.name, f"{4 * case.cache_elements / GIB:.1f} GiB of keys and values do not fit")
        return
    if not budget.allows(results, case.name, 1):
        return
    with results.check_figure(case.name):
        seconds = time_attention(target, keys, case, num_calls)
        if case.num_new > 1:
            results.figure(case.name, case.flops / seconds / 1e12, "TFLOP/s", PREFILL_ATTENTION)
        else:
            share = 100 * case.num_bytes / seconds / ceilings.bandwidth
            note = f"{case.num_bytes / seconds / GB:,.0f} GB/s, {seconds * 1e6:,.0f} us"
            results.figure(case.name, share, "% of copy", DECODE_ATTENTION, note)


def time_attention(target: Target, keys: Keys, case: Case, num_calls: int) -> float:
    """Seconds of a call."""
    backend = CudaAttentionBackend(target.namespace, case.deterministic)
    metadata = make_metadata(target, backend, case)
    shape = (case.num_seqs * case.num_new, case.shape.num_q_heads, case.shape.head_dim)
    q = torch.empty(shape, dtype=DTYPE, device=target.device).normal_()
    out = torch.empty_like(q)
    scale = case.shape.head_dim**-0.5

    def attend() -> None:
        for index in range(num_calls):
            backend.attend(out, q, keys.part(case, index), metadata, 0, None, scale, 0.0, 0)

    seconds = target.median_captured(attend) / num_calls
    assert bool(out.isfinite().all()), "the output is not finite"
    return seconds


def make_metadata(target: Target, backend: CudaAttentionBackend, case: Case) -> AttentionMetadata:
    """Blocks lie about in a random order, as after some hours."""
    q_lens = np.full(case.num_seqs, case.num_new, np.int32)
    seq_lens = np.full(case.num_seqs, case.num_keys, np.int32)
    plan = backend.plan(q_lens, seq_lens, case.shape)
    num_blocks = case.num_seqs * case.blocks_per_seq
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(target.device)

    return AttentionMetadata(
        cu_seqlens_q=there(np.arange(case.num_seqs + 1, dtype=np.int32) * case.num_new),
        seq_lens=there(seq_lens),
        block_tables=(there(order.reshape(case.num_seqs, -1)),),
        slot_mappings=(),
        work=there(plan.work),
        merge=there(plan.merge),
        workspace=torch.empty(plan.workspace_size, dtype=torch.float32, device=target.device),
    )
