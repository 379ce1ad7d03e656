"""Builds paged caches for attention tests: shuffled blocks, NaN in every slot that holds no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagedllm.ops.attention import AttentionShape, CpuAttentionBackend, paged_attention


@dataclass
class Case:
    backend: CpuAttentionBackend
    shape: AttentionShape
    q: Tensor  # [T, num_q_heads, head_dim], rows strided as in a qkv buffer
    keys: list[Tensor]  # of each sequence [len, num_kv_heads, head_dim]
    values: list[Tensor]
    q_lens: list[int]
    block_size: int
    # of a sequence: whose first blocks it has, and how many
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def seq_lens(self) -> list[int]:
        return [len(k) for k in self.keys]


def make_case(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = AttentionShape(num_q_heads, num_kv_heads, head_dim)
    rows = torch.randn(sum(q_lens), num_q_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    keys, values = (
        [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens] for _ in range(2)
    )
    return Case(CpuAttentionBackend("pagedllm"), shape, rows[:, :num_q_heads], keys, values, list(q_lens), block_size)


def share_prefixes(case: Case, rng: np.random.Generator) -> None:
    """Most sequences get the first keys of one before them, in its blocks."""
    for seq in range(1, len(case.keys)):
        other = int(rng.integers(seq))
        most = min(len(case.keys[seq]) - case.q_lens[seq], len(case.keys[other]) - case.q_lens[other])
        num_blocks = int(rng.choice([0, most, most, most, rng.integers(most + 1)])) // case.block_size
        for rows in (case.keys, case.values):
            rows[seq][: num_blocks * case.block_size] = rows[other][: num_blocks * case.block_size]
        case.shared[seq] = other, num_blocks


def operands(case: Case, seed: int = 0, *, together: bool = False) -> list[Tensor]:
    """The tensors of paged_attention from `out` to `workspace`; the seed shuffles the blocks.

    together: the plan may look for blocks in common.
    """
    backend, block_size = case.backend, case.block_size
    q_lens, seq_lens = np.array(case.q_lens, np.int32), np.array(case.seq_lens, np.int32)
    num_blocks = -(-seq_lens // block_size)
    spec = backend.kv_cache_spec(
        int(num_blocks.sum()) + 2, block_size, case.shape.num_kv_heads, case.shape.head_dim, case.q.dtype
    )
    k_cache, v_cache = (torch.full(s, torch.nan, dtype=spec.dtype) for s in (spec.k_shape, spec.v_shape))
    free = np.random.default_rng(seed).permutation(spec.k_shape[0])
    block_table = torch.full((len(seq_lens), int(num_blocks.max()) + 3), 10**6, dtype=torch.int32)
    for seq, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        ids, free = torch.from_numpy(free[: num_blocks[seq]].copy()), free[num_blocks[seq] :]
        if seq in case.shared:
            other, num_shared = case.shared[seq]
            ids[:num_shared] = block_table[other, :num_shared]
        block_table[seq, : len(ids)] = ids
        position = torch.arange(len(k))
        slots = ids[position // block_size] * block_size + position % block_size
        backend.layout.write_slots(k_cache, v_cache, slots, k, v)
    plan = backend.plan(q_lens, seq_lens, case.shape, (block_table.numpy(),) if together else (), block_size)
    cu_seqlens_q = torch.from_numpy(np.concatenate(([0], q_lens.cumsum())).astype(np.int32))
    return [
        torch.full(case.q.shape, -99.0, dtype=case.q.dtype), case.q, k_cache, v_cache, block_table, cu_seqlens_q,
        torch.from_numpy(seq_lens), torch.from_numpy(plan.work), torch.from_numpy(plan.merge),
        torch.full((plan.workspace_size,), torch.nan),
    ]  # fmt: skip


def attend(
    case: Case,
    namespace: str,
    *,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    scale: float | None = None,
    seed: int = 0,
    together: bool = False,
) -> Tensor:
    """[T, num_q_heads, head_dim] of the operator."""
    tensors = operands(case, seed, together=together)
    paged_attention(namespace, *tensors, sinks, scale or case.shape.head_dim**-0.5, softcap, window)
    return tensors[0]


def exact(case: Case, *, sinks: Tensor | None = None, softcap: float = 0.0, window: int = 0) -> Tensor:
    """The definition in float64."""
    group = case.shape.num_q_heads // case.shape.num_kv_heads
    out = []
    for q, keys, values in zip(case.q.double().split(case.q_lens), case.keys, case.values, strict=True):
        k, v = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))  # [heads, keys, dim]
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * case.shape.head_dim**-0.5  # [heads, new tokens, keys]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores)
        for token in range(len(q)):
            position = len(keys) - len(q) + token
            weights[:, token, position + 1 :] = 0
            if window:
                weights[:, token, : max(0, position + 1 - window)] = 0
        total = weights.sum(-1)
        if sinks is not None:
            total += sinks.double().exp()[:, None]
        out.append(((weights @ v) / total[..., None]).transpose(0, 1))
    return torch.cat(out)
