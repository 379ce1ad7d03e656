"""PromptScorer: logprobs of prompt tokens, from the hidden rows of the step that was just computed.

The head runs over slices of SLICE_ROWS rows, each reduced to its top k before the next overwrites it, so memory does
not grow with the prompt: no [tokens, vocab_size] tensor exists. Rows are independent, so slices change no bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.decoder import Decoder
from pagedllm.request import LogprobRows
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.forward_batch import ForwardBatch
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.sampler import Sampler

SLICE_ROWS = 64  # 38 MB of logits for 150,000 tokens; products of the head run at 90 % of their rate for many rows


class PromptScorer:
    def __init__(
        self,
        decoder: Decoder,
        buffers: DecoderBuffers,
        sampler: Sampler,
        rows: RequestRows,
        sampling_rows: SamplingRows,
    ) -> None:
        self.decoder = decoder
        self.buffers = buffers
        self.sampler = sampler
        self.rows = rows
        self.sampling_rows = sampling_rows
        self.slice_rows = min(SLICE_ROWS, buffers.logits.shape[0])

    def score(self, batch: ForwardBatch) -> dict[int, LogprobRows]:
        """By sequence of the batch, of those that want any. Overwrites the step's logits."""
        pieces: dict[int, list[LogprobRows]] = {}
        device = self.buffers.logits.device
        step_rows = self.buffers.step_rows(len(batch.token_ids))
        for begin in range(0, len(batch.scored_indices), self.slice_rows):
            indices = batch.scored_indices[begin : begin + self.slice_rows]
            sequences = batch.scored_sequences[begin : begin + self.slice_rows]
            logits = self.decoder.logits(torch.from_numpy(indices).to(device), step_rows, self.buffers)
            rows = batch.rows[sequences]
            following = torch.from_numpy(self.rows.token_ids[rows, batch.positions[indices] + 1]).to(device)
            self._split(logits, following, sequences, self.sampling_rows.num_prompt_logprobs[rows], pieces)
        return {seq: LogprobRows.joined(parts) for seq, parts in pieces.items()}

    def _split(
        self,
        logits: Tensor,
        token_ids: Tensor,
        sequences: NDArray[np.intp],
        ks: NDArray[np.int32],
        pieces: dict[int, list[LogprobRows]],
    ) -> None:
        """One slice: logits [S, V], the tokens [S] to judge, whose they are and how many of the top each wants."""
        found = self.sampler.top_logprobs(logits, token_ids, max(1, int(ks.max())))
        is_greedy = found.token_ids[:, 0] == found.token_ids[:, 1]
        starts = np.flatnonzero(np.diff(sequences, prepend=-1)).tolist()
        for begin, end in zip(starts, [*starts[1:], len(sequences)], strict=True):
            width = 1 + int(ks[begin])
            part = LogprobRows(
                found.token_ids[begin:end, :width].copy(),
                found.logprobs[begin:end, :width].copy(),
                found.ranks[begin:end],
                is_greedy[begin:end],
            )
            pieces.setdefault(int(sequences[begin]), []).append(part)
