"""ForwardBatch: the numbers of one forward pass, from a plan and the persistent rows. Pure numpy, no request objects.

B sequences, T new tokens in all, R of them to sample after, S whose logits score the prompt's next token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedllm.engine.scheduler_output import SchedulerOutput
from pagedllm.runtime.block_table import RequestRows

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    rows: NDArray[np.intp]  # [B] persistent row of each sequence
    q_lens: Int32Array  # [B] new tokens
    cu_seqlens_q: Int32Array  # [B + 1]
    seq_lens: Int32Array  # [B] keys, new ones included
    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    token_rows: NDArray[np.intp]  # [T] persistent row of each token
    slot_mappings: tuple[NDArray[np.int64], ...]  # per KV group [T]
    block_tables: tuple[Int32Array, ...]  # per KV group [B, max_blocks]
    logits_indices: Int32Array  # [R] the last known token of a sequence
    logits_sequences: NDArray[np.intp]  # [R] the sequence of each, increasing
    scored_indices: Int32Array  # [S] increasing
    scored_sequences: NDArray[np.intp]  # [S] increasing

    @property
    def is_decode(self) -> bool:
        """One new token for each sequence, and its logits are wanted: B = T = R."""
        return len(self.rows) == len(self.token_ids) == len(self.logits_indices)


def build_forward_batch(plan: SchedulerOutput, rows_of: RequestRows, block_size: int) -> ForwardBatch:
    """The plan's requests in the plan's order; every row is already up to date."""
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    rows = np.fromiter((rows_of.row_of(s.request_id) for s in scheduled), np.intp, num_seqs)
    computed = np.fromiter((s.num_computed_tokens for s in scheduled), np.int32, num_seqs)
    q_lens = np.fromiter((s.num_new_tokens for s in scheduled), np.int32, num_seqs)
    first_logits = np.fromiter((s.first_logits_index for s in scheduled), np.int32, num_seqs)

    seq_lens = computed + q_lens
    cu_seqlens_q = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(q_lens, out=cu_seqlens_q[1:])
    token_seq = np.repeat(np.arange(num_seqs), q_lens)  # [T]
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) - (cu_seqlens_q[:-1] - computed)[token_seq]
    token_rows = rows[token_seq]
    block_index, offset = np.divmod(positions, block_size)
    slot_mappings = tuple(
        table[token_rows, block_index].astype(np.int64) * block_size + offset for table in rows_of.block_tables
    )
    wanted = np.flatnonzero(positions >= first_logits[token_seq]).astype(np.int32)
    wanted_sequences = token_seq[wanted]
    is_last = positions[wanted] == rows_of.num_tokens[rows[wanted_sequences]] - 1
    return ForwardBatch(
        rows=rows,
        q_lens=q_lens,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        token_ids=rows_of.token_ids[token_rows, positions],
        positions=positions,
        token_rows=token_rows,
        slot_mappings=slot_mappings,
        block_tables=tuple(rows_of.block_table(g, rows) for g in range(len(rows_of.block_tables))),
        logits_indices=wanted[is_last],
        logits_sequences=wanted_sequences[is_last],
        scored_indices=wanted[~is_last],
        scored_sequences=wanted_sequences[~is_last],
    )
