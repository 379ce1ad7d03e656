"""ModelRunner: executes one plan. Holds the tensors and the persistent rows; decides nothing.

    update rows from the plan -> ForwardBatch -> attention plan -> decoder -> sampler -> ModelRunnerOutput

The runner keeps the tokens it samples, so that a running request's next plan has nothing to tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagedllm.errors import RequestError
from pagedllm.model.decoder import Decoder, DecoderInput
from pagedllm.ops.attention import AttentionBackend
from pagedllm.request import TokenLogprobs
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.decode_tapes import DecodeTapes
from pagedllm.runtime.device import torch_threads
from pagedllm.runtime.forward_batch import ForwardBatch, build_forward_batch
from pagedllm.runtime.kv_cache import KVCache
from pagedllm.runtime.metadata import MetadataBuilder
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.sampler import Sampler


class ModelRunner:
    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        namespace: str,
        kv_cache: KVCache,
        rope_row_offsets: Sequence[NDArray[np.int32]],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_threads: int,
        recorder: Path | None,
    ) -> None:
        """rope_row_offsets: per rope of the model [num_variants], where a variant begins in its table.

        recorder: the library whose kernels decode steps are recorded from; None: every step is run by Python.
        """
        config = decoder.config
        self.decoder = decoder
        self.backend = backend
        self.kv_cache = kv_cache
        self.num_threads = num_threads
        self.block_size = kv_cache.block_size
        self.rope_row_offsets = rope_row_offsets
        self.metadata_builder = MetadataBuilder(backend, config)
        self.rows = RequestRows(max_num_seqs, max_model_len, kv_cache.block_size, config.num_kv_groups)
        self.sampling_rows = SamplingRows(max_num_seqs, config.vocab_size)
        self.sampler = Sampler(namespace, config.vocab_size, self.sampling_rows)
        self.buffers = decoder.allocate_buffers(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
        self.decode_tapes = DecodeTapes(recorder, decoder, kv_cache.layers, self.buffers) if recorder else None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        with torch_threads(self.num_threads), torch.inference_mode():
            self._update_rows(plan)
            self._copy_blocks(plan.blocks_to_copy)
            if not plan.scheduled:
                return ModelRunnerOutput((), ())
            batch = build_forward_batch(plan, self.rows, self.block_size)
            logits = self.forward(batch)
            return self._sample(plan, batch, logits)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[R, vocab_size] float32 logits of the wanted rows, in a buffer that the next step overwrites."""
        metadata = self.metadata_builder.build(batch)
        variants = self.rows.rope_variant[batch.token_rows]
        inputs = DecoderInput(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            rope_rows=tuple(torch.from_numpy(batch.positions + offset[variants]) for offset in self.rope_row_offsets),
            logits_indices=torch.from_numpy(batch.logits_indices),
        )
        if self.decode_tapes is not None and batch.is_decode:
            logits = self.decode_tapes.forward(inputs, metadata)
        else:
            logits = self.decoder.forward(inputs, metadata, self.kv_cache.layers, self.buffers)
        return self.decoder.finish_logits(logits)

    def close(self) -> None:
        """Gives the weights, buffers and the KV cache back; the runner is dead afterwards."""
        self.kv_cache.close()
        self.decoder.close()
        del self.decoder, self.buffers, self.metadata_builder, self.decode_tapes

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for request_id in plan.released_request_ids:
            row = self.rows.release(request_id)
            if row is not None:
                self.sampling_rows.clear(row)
        for scheduled in plan.scheduled:
            new = scheduled.new_request
            if new is not None:
                row = self.rows.acquire(scheduled.request_id, new.num_prompt_tokens, new.rope_variant)
                self.rows.append_tokens(row, scheduled.new_token_ids)
                self.rows.append_blocks(row, scheduled.new_block_ids)
                self.sampling_rows.set(row, new, self.rows.token_ids[row, : self.rows.num_tokens[row]])
            elif scheduled.new_token_ids or any(scheduled.new_block_ids):
                row = self.rows.row_of(scheduled.request_id)
                self.rows.append_tokens(row, scheduled.new_token_ids)
                self.rows.append_blocks(row, scheduled.new_block_ids)

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            tensor = torch.tensor(pairs, dtype=torch.int32, device="cpu")
            for layer in self.kv_cache.layers:
                self.backend.copy_blocks(layer, tensor)

    def _sample(self, plan: SchedulerOutput, batch: ForwardBatch, logits: Tensor) -> ModelRunnerOutput:
        """Tokens for each sequence whose last token was computed; the runner's rows take up the first of each."""
        num_seqs = len(batch.rows)
        sampled: list[tuple[int, ...]] = [()] * num_seqs
        is_finite = [True] * num_seqs
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        errors: dict[str, RequestError] = {}
        if len(batch.logits_indices):
            sequences, offsets = batch.logits_sequences, np.zeros(len(batch.logits_sequences), np.int32)
            num_samples = [plan.scheduled[seq].num_samples for seq in sequences.tolist()]
            if max(num_samples) > 1:
                places, offsets = _repeated(num_samples)
                sequences, logits = sequences[places], logits[torch.from_numpy(places)]
            rows = batch.rows[sequences]
            positions = batch.seq_lens[sequences] - self.rows.num_prompt_tokens[rows]
            output = self.sampler.sample(logits, rows, positions, self.sampling_rows.sample_index[rows] + offsets)
            if output.logprobs is not None:
                logprobs = [()] * num_seqs
                for seq, entry in zip(sequences.tolist(), output.logprobs, strict=True):
                    logprobs[seq] += () if entry is None else (entry,)
            errors = {plan.scheduled[sequences[i]].request_id: error for i, error in output.errors.items()}
            for seq, token_id in zip(sequences.tolist(), output.token_ids, strict=True):
                sampled[seq] += (token_id,)
            self._keep(plan, batch, sampled, is_finite)
        return ModelRunnerOutput(sampled, is_finite, logprobs, errors)

    def _keep(
        self, plan: SchedulerOutput, batch: ForwardBatch, sampled: list[tuple[int, ...]], is_finite: list[bool]
    ) -> None:
        """Empties `sampled` where there was nothing to draw from, and for beams, whose tokens are chosen elsewhere."""
        has_state = self.sampling_rows.has_stateful_rows
        sequences = batch.logits_sequences.tolist()
        kept = []
        for seq in sequences:
            if min(sampled[seq]) < 0:
                is_finite[seq] = False
            if min(sampled[seq]) < 0 or not plan.scheduled[seq].num_samples:
                sampled[seq] = ()
                continue
            kept.append(seq)
            if has_state:
                self.sampling_rows.accept(int(batch.rows[seq]), sampled[seq][0])
        rows, ends = batch.rows[kept], batch.seq_lens[kept]
        self.rows.token_ids[rows, ends] = [sampled[seq][0] for seq in kept]
        self.rows.num_tokens[rows] = ends + 1


def _repeated(counts: Sequence[int]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Each place as often as it counts, at least once, and the number of each among its equals."""
    places = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
    firsts = np.searchsorted(places, places)
    return places, (np.arange(len(places)) - firsts).astype(np.int32)
