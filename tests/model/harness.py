"""Runs a Decoder without an engine: sequences with block tables of their own, one step at a time.

Blocks are handed out in a scattered order and KV tensors start as NaN, so that a read of a wrong slot shows.
Others may use it wherever a decoder's logits are wanted: `Sequences(decoder).logits(ids)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagedllm.model.decoder import Decoder, DecoderInput
from pagedllm.model.loader import load_model, open_checkpoint
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionShape, CpuAttentionBackend

REFERENCE = "pagedllm_reference"


def load(folder: Path, dtype: torch.dtype = torch.float32, namespace: str = REFERENCE) -> Decoder:
    return load_model(open_checkpoint(str(folder)), dtype, CpuAttentionBackend(namespace), namespace)


class Sequences:
    """The KV cache of a few sequences, and steps over them."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        max_num_tokens: int = 512,
        max_model_len: int | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        self.backend = backend or CpuAttentionBackend(decoder.namespace)
        self.shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
        spec = self.backend.kv_cache_spec(num_blocks, block_size, config.num_kv_heads, config.head_dim, decoder.dtype)
        self.kv_caches = [
            (
                torch.full(spec.k_shape, torch.nan, dtype=spec.dtype),
                torch.full(spec.v_shape, torch.nan, dtype=spec.dtype),
            )
            for _ in config.layers
        ]
        self.tables = RopeTables(config.ropes, config.max_position, max_model_len or config.max_position)
        decoder.set_rope_tables(self.tables)
        self.buffers = decoder.allocate_buffers(max_num_tokens, max_num_tokens)
        self.free_blocks = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.block_tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.variants: dict[str, int] = {}

    def begin(self, name: str, num_total_tokens: int | None) -> None:
        """A new sequence that may grow to `num_total_tokens`."""
        self.block_tables[name], self.lengths[name] = [], 0
        self.variants[name] = self.tables.variant(num_total_tokens)

    def step(self, new_tokens: Mapping[str, Sequence[int]], *, num_logits: int | None = 1) -> dict[str, Tensor]:
        """Appends tokens to each sequence; its last `num_logits` rows (None: all) as float32 [rows, V], copies."""
        token_ids, positions, slots, logits_indices = [], [], [], []
        for name, ids in new_tokens.items():
            begin = self.lengths[name]
            end = self.lengths[name] = begin + len(ids)
            table = self.block_tables[name]
            while len(table) * self.block_size < end:
                table.append(self.free_blocks.pop())
            wanted = len(ids) if num_logits is None else num_logits
            logits_indices += range(len(token_ids) + len(ids) - wanted, len(token_ids) + len(ids))
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(begin, end)]
            positions += [(p, self.variants[name]) for p in range(begin, end)]
            token_ids += ids
        inputs = DecoderInput(
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=torch.tensor([p for p, _ in positions], dtype=torch.int32),
            rope_rows=tuple(
                torch.tensor([p + self.tables.row_offset(index, v) for p, v in positions], dtype=torch.int32)
                for index in range(len(self.decoder.config.ropes))
            ),
            logits_indices=torch.tensor(logits_indices, dtype=torch.int32),
        )
        logits = self.decoder.forward(inputs, self._metadata(new_tokens, slots), self.kv_caches, self.buffers)
        sizes = [len(ids) if num_logits is None else num_logits for ids in new_tokens.values()]
        return dict(zip(new_tokens, logits.clone().split(sizes), strict=True))

    def logits(
        self, token_ids: Sequence[int], *, chunk: int | None = None, num_total_tokens: int | None = None
    ) -> Tensor:
        """Of every position of a new sequence, [len(token_ids), V], computed `chunk` tokens a step."""
        name = f"sequence {len(self.lengths)}"
        self.begin(name, num_total_tokens or len(token_ids))
        chunk = chunk or len(token_ids)
        pieces = [
            self.step({name: token_ids[begin : begin + chunk]}, num_logits=None)[name]
            for begin in range(0, len(token_ids), chunk)
        ]
        return torch.cat(pieces)

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely continuation, prefilled at once and decoded one token a step."""
        name = f"sequence {len(self.lengths)}"
        self.begin(name, len(token_ids) + num_tokens)
        new, output = list(token_ids), []
        for _ in range(num_tokens):
            new = [int(self.step({name: new})[name].argmax())]
            output += new
        return output

    def _metadata(self, new_tokens: Mapping[str, Sequence[int]], slots: list[int]) -> AttentionMetadata:
        q_lens = np.array([len(ids) for ids in new_tokens.values()], np.int32)
        seq_lens = np.array([self.lengths[name] for name in new_tokens], np.int32)
        plan = self.backend.plan(q_lens, seq_lens, self.shape)
        block_table = torch.zeros(
            len(new_tokens), max(len(self.block_tables[n]) for n in new_tokens), dtype=torch.int32
        )
        for row, name in enumerate(new_tokens):
            block_table[row, : len(self.block_tables[name])] = torch.tensor(self.block_tables[name])
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *q_lens.cumsum()], dtype=torch.int32),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=(block_table,),
            slot_mappings=(torch.tensor(slots, dtype=torch.int64),),
            work=torch.from_numpy(plan.work),
            merge=torch.from_numpy(plan.merge),
            workspace=torch.zeros(plan.workspace_size),
        )
