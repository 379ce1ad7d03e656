"""SamplingRows: each request's sampling parameters as arrays, one element per persistent row of the runner.

Set once when a request enters the batch; a step gathers the rows it samples. Requests without masks, bias, penalties
and logprobs, the common case, cost nothing more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedllm.engine.scheduler_output import NewRequestData
from pagedllm.sampling.processors import MaskProcessor, PenaltyCounts, UserProcessors, make_mask_processors
from pagedllm.sampling_params import MAX_LOGIT_BIAS


class SamplingRows:
    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.sample_index = np.zeros(max_num_seqs, np.int32)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)  # -1: none wanted
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int32)  # besides the prompt token's own
        self.needs_logits = np.zeros(max_num_seqs, np.bool_)  # False: its likeliest token is all that it wants
        self.masks: dict[int, tuple[MaskProcessor, ...]] = {}  # by row, only rows that have any
        self.bias: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}  # ids, values
        self.user: dict[int, UserProcessors] = {}
        self.counts: dict[int, PenaltyCounts] = {}

    def set(self, row: int, request: NewRequestData, token_ids: NDArray[np.int32]) -> None:
        """token_ids: prompt and, for a request that comes back after preemption, the output so far."""
        params = request.sampling_params
        self.clear(row)
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_k[row] = max(0, min(params.top_k, self.vocab_size))
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = np.uint64(request.seed & (2**64 - 1)).astype(np.int64)
        self.sample_index[row] = request.sample_index
        if params.logprobs is not None:
            self.num_logprobs[row] = self._num_top(params.logprobs)
        self.num_prompt_logprobs[row] = self._num_top(params.prompt_logprobs or 0)
        output: list[int] = token_ids[request.num_prompt_tokens :].tolist()
        masks = make_mask_processors(request, self.vocab_size)
        if masks:
            for mask in masks:
                for token_id in output:
                    mask.accept(token_id)
            self.masks[row] = masks
        if params.logit_bias:
            values = np.clip(np.fromiter(params.logit_bias.values(), np.float32), -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
            self.bias[row] = (np.fromiter(params.logit_bias, np.int32), values)
        if params.logits_processors:
            self.user[row] = UserProcessors(params.logits_processors, output)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self.penalties[row] = penalties
            self.counts[row] = PenaltyCounts(token_ids, request.num_prompt_tokens)
        is_edited = any(row in of_rows for of_rows in (self.masks, self.bias, self.user, self.counts))
        self.needs_logits[row] = not params.is_greedy or params.logprobs is not None or is_edited

    def _num_top(self, wanted: int) -> int:
        return self.vocab_size if wanted == -1 else min(wanted, self.vocab_size)

    def clear(self, row: int) -> None:
        self.num_logprobs[row] = -1
        self.masks.pop(row, None)
        self.bias.pop(row, None)
        self.user.pop(row, None)
        self.counts.pop(row, None)

    def accept(self, row: int, token_id: int) -> None:
        """Tells the row's masks, callables and penalties of a token that was sampled."""
        for mask in self.masks.get(row, ()):
            mask.accept(token_id)
        if row in self.user:
            self.user[row].accept(token_id)
        if row in self.counts:
            self.counts[row].add(token_id)

    def follow_output(self, rows: NDArray[np.intp]) -> bool:
        """Whether `accept` does anything for one of these rows."""
        if not (self.masks or self.user or self.counts):
            return False
        return any(not kept.keys().isdisjoint(rows.tolist()) for kept in (self.masks, self.user, self.counts))
