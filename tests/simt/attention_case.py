"""A batch for the emulated paged attention: its tensors, what the operator gives, what float64 gives."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagedllm.ops.attention import AttentionMetadata, AttentionShape
from pagedllm.ops.cuda_attention import CudaAttentionBackend

NAN = math.nan


@dataclass(frozen=True)
class AttentionCase:
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0
    window: int = 0
    has_sinks: bool = False
    deterministic: bool = True
    seed: int = 0
    prefixes: tuple[tuple[int, int], ...] = ()  # per sequence: an earlier one, and how many of its keys are its own too
    is_shared: bool = False  # sequences with equal blocks are attended together, however little that saves

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_q_heads, self.num_kv_heads, self.head_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Batch:
    """Tensors of a case. Slots that no key lives in hold NaN; block ids past a sequence's end are out of range, those
    before its window name a block of NaN."""

    case: AttentionCase
    q: Tensor
    kv_cache: tuple[Tensor, Tensor]
    metadata: AttentionMetadata
    sinks: Tensor | None
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full_like(self.q, NAN)

    def attend(self) -> Tensor:
        c = self.case
        backend = CudaAttentionBackend("pagedllm_simt", c.deterministic)
        backend.attend(self.out, self.q, self.kv_cache, self.metadata, 0, self.sinks, c.scale, c.softcap, c.window)
        return self.out

    def expected(self) -> Tensor:
        """Plain softmax in float64."""
        return self._plain(torch.float64)

    def by_torch(self) -> Tensor:
        """As models' eager attention computes it: products in the case's type, softmax in float32."""
        return self._plain(self.case.dtype)

    def _plain(self, dtype: torch.dtype) -> Tensor:
        c, m = self.case, self.metadata
        softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.zeros(self.q.shape, dtype=dtype)
        begin = 0
        for seq, (num_new, length) in enumerate(zip(c.q_lens, c.seq_lens, strict=True)):
            if num_new == 0:
                continue
            num_blocks = -(-length // c.block_size)
            k, v = (
                cache[m.block_tables[0][seq, :num_blocks].long()].transpose(1, 2).flatten(0, 1)[:length].to(dtype)
                for cache in self.kv_cache
            )
            if c.window:  # what lies before it is hidden below; 0 * NaN would not be
                k, v = k.nan_to_num(), v.nan_to_num()
            k, v = (x.repeat_interleave(c.num_q_heads // c.num_kv_heads, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", self.q[begin : begin + num_new].to(dtype), k) * c.scale
            if c.softcap:
                scores = c.softcap * torch.tanh(scores / c.softcap)
            query, key = torch.arange(length - num_new, length)[:, None], torch.arange(length)[None]
            is_visible = key <= query
            if c.window:
                is_visible &= key > query - c.window
            scores = scores.masked_fill(~is_visible, -math.inf)
            if self.sinks is not None:
                sinks = self.sinks.to(dtype)[:, None, None].expand(-1, num_new, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1, dtype=softmax_dtype).to(dtype)[..., :length]
            out[begin : begin + num_new] = torch.einsum("hqk,khd->qhd", weights, v)
            begin += num_new
        return out


def make_batch(case: AttentionCase) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    c = case
    blocks_of = [-(-length // c.block_size) for length in c.seq_lens]
    num_blocks = sum(blocks_of) + 3
    ids = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = torch.full((len(c.seq_lens), max(blocks_of)), 10**6, dtype=torch.int32)
    shape = (num_blocks, c.num_kv_heads, c.block_size, c.head_dim)
    k_cache, v_cache = (torch.full(shape, NAN, dtype=c.dtype) for _ in range(2))
    used = 0
    for seq, length in enumerate(c.seq_lens):
        source, num_shared = c.prefixes[seq] if c.prefixes else (0, 0)
        first_own = num_shared // c.block_size
        block_table[seq, :first_own] = block_table[source, :first_own]
        for index in range(first_own, blocks_of[seq]):
            block = int(ids[used])
            used += 1
            block_table[seq, index] = block
            num_keys = min(c.block_size, length - index * c.block_size)
            for cache in (k_cache, v_cache):
                cache[block, :, :num_keys] = torch.randn(c.num_kv_heads, num_keys, c.head_dim, generator=generator).to(
                    c.dtype
                )
    for seq, (num_new, length) in enumerate(zip(c.q_lens, c.seq_lens, strict=True)):
        if c.window:
            block_table[seq, : max(0, length - num_new + 1 - c.window) // c.block_size] = ids[-1]
    q = (torch.randn(sum(c.q_lens), c.num_q_heads, c.head_dim, generator=generator)).to(c.dtype)
    sinks = torch.randn(c.num_q_heads, generator=generator) if c.has_sinks else None
    return Batch(c, q, (k_cache, v_cache), make_metadata(c, block_table), sinks)


def make_metadata(c: AttentionCase, block_table: Tensor) -> AttentionMetadata:
    q_lens, seq_lens = (np.array(x, np.int32) for x in (c.q_lens, c.seq_lens))
    backend = CudaAttentionBackend("pagedllm_simt", c.deterministic)
    backend.shared_launch_bytes = 0
    tables = (block_table.numpy(),) if c.is_shared else ()
    plan = backend.plan(q_lens, seq_lens, c.shape, tables, c.block_size, c.window)
    cu_seqlens_q = torch.from_numpy(np.concatenate(([0], q_lens.cumsum())).astype(np.int32))
    return AttentionMetadata(
        cu_seqlens_q, torch.from_numpy(seq_lens), (block_table,), (torch.empty(0, dtype=torch.int64),),
        (torch.from_numpy(plan.work),), (torch.from_numpy(plan.merge),), torch.full((plan.workspace_size,), NAN),
    )  # fmt: skip


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def random_case(seed: int) -> AttentionCase:
    r = random.Random(seed)
    num_kv_heads = r.choice((1, 1, 2, 3))
    group = r.choice((1, 2, 3, 4, 6, 7, 8, 20))
    mode = r.choice(("decode", "prefill", "mixed"))
    q_lens, seq_lens = [], []
    for _ in range(r.randint(1, 3)):
        is_decode = mode == "decode" or (mode == "mixed" and r.random() < 0.5)
        num_new = 1 if is_decode else r.randint(1, max(1, 60 // group))
        q_lens.append(num_new)
        seq_lens.append(num_new + (r.randint(0, 150) if mode != "prefill" else r.randint(0, 1) * r.randint(0, 90)))
    if r.random() < 0.15:  # several splits
        seq_lens[0] += r.choice((400, 512, 700))
    return AttentionCase(
        tuple(q_lens), tuple(seq_lens), num_kv_heads * group, num_kv_heads,
        head_dim=r.choice((64, 64, 80, 96, 112, 128, 256)), block_size=r.choice((8, 16, 32, 64, 128)),
        dtype=r.choice((torch.bfloat16, torch.float16)), softcap=r.choice((0.0, 0.0, 30.0)),
        window=r.choice((0, 0, r.randint(1, 90))), has_sinks=r.random() < 0.3,
        deterministic=r.random() < 0.8, seed=seed,
    )  # fmt: skip
