"""ModelRunner: executes one plan. Holds the tensors and the persistent rows; decides nothing.

    update rows from the plan -> ForwardBatch -> attention plan -> decoder -> sampler -> ModelRunnerOutput

The runner keeps the tokens it samples, so that a running request's next plan has nothing to tell it: on the host, and
where a GPU computes there (`LastTokens`). A GPU computes in the background: `launch` reads nothing from it, so that the
next step can be launched before the results of this one are taken. What those say of rows is not written to them then:
a row may be another's meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagedllm.errors import RequestError
from pagedllm.model.causal_model import CausalModel
from pagedllm.model.decoder import Decoder
from pagedllm.ops.attention import AttentionBackend
from pagedllm.request import TokenLogprobs
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.compute_device import ComputeDevice, Gpu, out_of_memory
from pagedllm.runtime.cuda_graph import DecodeGraphs
from pagedllm.runtime.decode_tapes import DecodeTapes
from pagedllm.runtime.device import torch_threads
from pagedllm.runtime.forward_batch import BatchBuilder, ForwardBatch
from pagedllm.runtime.kv_cache import KVCache
from pagedllm.runtime.last_tokens import LastTokens
from pagedllm.runtime.metadata import MetadataBuilder
from pagedllm.runtime.prompt_scorer import SLICE_ROWS, PromptScorer
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.sampler import Drawn, Sampler, SamplerInput

NUM_SAMPLES = attrgetter("num_samples")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Draws:
    """What is sampled in a step."""

    given: SamplerInput | None  # None: the likeliest tokens, which the decoder finds
    sequences: NDArray[np.intp]  # [R] of the batch, each as often as tokens are drawn for it
    places: NDArray[np.intp] | None  # [R] rows of the logits; None: each once
    keepers: NDArray[np.intp] | None  # [R] the row of LastTokens that keeps each token; None: the host keeps them
    follow_output: bool  # whether the sampler wants to know what was drawn

    @property
    def arrays(self) -> list[Array]:
        """The sampler's first."""
        given = self.given.arrays if self.given else ()
        return [*given, *(array for array in (self.places, self.keepers) if array is not None)]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that computes, and what is needed to make an output of its results."""

    plan: SchedulerOutput
    batch: ForwardBatch
    draws: _Draws | None = None  # None: nothing is sampled
    errors: dict[int, RequestError] = field(default_factory=dict)  # by place among what is drawn
    fetch: Callable[[], list[Array]] = list  # waits for what the sampler left on the device


class ModelRunner:
    def __init__(
        self,
        decoder: CausalModel,
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
        device: ComputeDevice,
        shares_prefixes: bool,
        captures_graphs: bool,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        """rope_row_offsets: per rope of the model [num_variants], where a variant begins in its table.

        recorder: the library whose kernels decode steps are recorded from; captures_graphs: they are captured on the
        GPU; neither: every step is run by Python. shares_prefixes: whether requests may hold equal blocks.
        """
        config = decoder.config
        self.decoder = decoder
        self.backend = backend
        self.kv_cache = kv_cache
        self.num_threads = num_threads
        self.rope_row_offsets = rope_row_offsets
        self.device = device
        self.stager = device.stager()
        self.metadata_builder = MetadataBuilder(
            backend, config, kv_cache.block_size, device.torch_device, shares_prefixes=shares_prefixes
        )
        self.rows = RequestRows(max_num_seqs, max_model_len, kv_cache.block_size, config.num_kv_groups)
        self.batches = BatchBuilder(self.rows, kv_cache.block_size)
        self.sampling_rows = SamplingRows(max_num_seqs, config.vocab_size)
        self.sampler = Sampler(namespace, config.vocab_size, self.sampling_rows, logprobs_mode)
        self.buffers = decoder.allocate_buffers(
            max_num_batched_tokens, num_logits_rows(max_num_seqs, max_num_batched_tokens)
        )
        self.scorer: PromptScorer | None = None
        self.decode_tapes: DecodeTapes | None = None
        if isinstance(decoder, Decoder):
            self.scorer = PromptScorer(decoder, self.buffers, self.sampler, self.rows, self.sampling_rows)
            if recorder is not None:
                self.decode_tapes = DecodeTapes(recorder, decoder, self.metadata_builder, kv_cache.layers, self.buffers)
        self.last_tokens = LastTokens(max_num_seqs, device.torch_device) if device.is_gpu else None
        self.decode_graphs: DecodeGraphs | None = None
        if captures_graphs:
            assert isinstance(device, Gpu)
            assert isinstance(decoder, Decoder)
            assert self.last_tokens is not None
            with torch.inference_mode():
                self.decode_graphs = DecodeGraphs(
                    device, decoder, self.metadata_builder, kv_cache.layers, self.buffers, self.last_tokens,
                    max_num_seqs=min(max_num_seqs, max_num_batched_tokens), max_model_len=max_model_len,
                )  # fmt: skip

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        with self._computing():
            return self._take_results(self._launch(plan))

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Starts a step; what it returns waits for the results. They are to be taken in the order of the launches, and
        before the next launch where a prompt is scored or a row follows its output."""
        with self._computing():
            launched = self._launch(plan)

        def take_results() -> ModelRunnerOutput:
            with self._computing():
                return self._take_results(launched)

        return take_results

    @contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            with torch_threads(self.num_threads), torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.device, error) from error

    def _launch(self, plan: SchedulerOutput) -> _Launched | None:
        """None where nothing is computed."""
        self._update_rows(plan)
        self._copy_blocks(plan.blocks_to_copy)
        if not plan.scheduled:
            return None
        batch = self.batches.build(plan)
        draws = self._prepare_draws(plan, batch)
        wants_likeliest = draws is not None and draws.given is None
        scores, staged = self.forward(batch, draws.arrays if draws else [], wants_likeliest)
        if draws is None:
            return _Launched(plan, batch)
        drawn = self._draw(batch, scores, draws, staged)
        return _Launched(plan, batch, draws, drawn.errors, self.device.fetch(drawn.tensors))

    def _take_results(self, launched: _Launched | None) -> ModelRunnerOutput:
        if launched is None:
            return ModelRunnerOutput((), ())
        num_seqs, output = len(launched.batch.rows), None
        if launched.draws is not None:
            output = self._take_up(launched.plan, launched.batch, launched.draws, launched.errors, launched.fetch())
        output = output or ModelRunnerOutput([()] * num_seqs, [True] * num_seqs)
        return self._with_scores(launched, output) if len(launched.batch.scored_indices) else output

    def forward(
        self, batch: ForwardBatch, tail: Sequence[Array], wants_likeliest: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """What `CausalModel.forward` gives for the wanted rows, in a buffer that the next step overwrites, and the
        arrays of `tail` on the device: all that a step reads is brought there at once."""
        has_variants = any(len(offset) > 1 for offset in self.rope_row_offsets)
        variants = self.rows.rope_variant[batch.token_rows] if has_variants else 0
        rope_rows = [batch.positions + offset[variants] for offset in self.rope_row_offsets]
        builder = self.metadata_builder
        plan = builder.plan(batch)
        graphs = self.decode_graphs
        if graphs is not None and graphs.serves(batch):
            logits, staged_tail = graphs.forward(batch, rope_rows, plan, tail)
            return logits, staged_tail or self.stager.stage(tail)
        arrays = builder.arrays(batch, rope_rows, plan)
        if self.decode_tapes is not None and batch.is_decode:
            return self.decode_tapes.forward(arrays, wants_likeliest), self.stager.stage(tail)
        staged = self.stager.stage([*arrays, *tail])
        inputs, metadata = builder.tensors(staged[: len(arrays)])
        if self.last_tokens is not None:
            self.last_tokens.fill(inputs.token_ids)
        scores = self.decoder.forward(inputs, metadata, self.kv_cache.layers, self.buffers, wants_likeliest)
        return scores, staged[len(arrays) :]

    def close(self) -> None:
        """Gives the weights, buffers and the KV cache back; the runner is dead afterwards."""
        self.kv_cache.close()
        self.decoder.close()
        del self.decoder, self.buffers, self.metadata_builder, self.scorer
        del self.decode_tapes, self.decode_graphs, self.stager, self.last_tokens
        if isinstance(self.device, Gpu):
            self.device.trim()

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
            tensor = torch.tensor(pairs, dtype=torch.int32, device=self.device.torch_device)
            for k_and_v in self.kv_cache.tensors:
                self.backend.copy_blocks(k_and_v, tensor)

    def _prepare_draws(self, plan: SchedulerOutput, batch: ForwardBatch) -> _Draws | None:
        """None where nothing is sampled."""
        if not len(batch.logits_indices):
            return None
        sequences, offsets, places = batch.logits_sequences, np.zeros(1, np.int32), None
        if set(map(NUM_SAMPLES, plan.scheduled)) != {1}:
            places, offsets = _repeated([plan.scheduled[seq].num_samples for seq in sequences.tolist()])
            sequences = sequences[places]
        rows, given, keepers = batch.rows[sequences], None, None
        if not self.decoder.finds_likeliest or self.sampling_rows.needs_logits[rows].any():
            positions = batch.seq_lens[sequences] - self.rows.num_prompt_tokens[rows]
            given = self.sampler.prepare(rows, positions, self.sampling_rows.sample_index[rows] + offsets)
        if self.last_tokens is not None:
            keepers = rows
            if places is not None:
                is_kept = [plan.scheduled[seq].num_samples > 0 for seq in sequences.tolist()]
                is_first = np.diff(sequences, prepend=-1) > 0
                keepers = np.where(is_first & is_kept, rows, self.last_tokens.nowhere)
        return _Draws(given, sequences, places, keepers, self.sampling_rows.follow_output(rows))

    def _draw(self, batch: ForwardBatch, scores: Tensor, draws: _Draws, staged: Sequence[Tensor]) -> Drawn:
        """Tokens for each sequence whose last token is computed. scores: of `forward`, logits or the likeliest tokens;
        staged: draws.arrays on the device, which keeps the first of each where it is a GPU: placeholders stand for them
        in the rows."""
        given, last_tokens = draws.given, self.last_tokens
        num_given = len(given.arrays) if given else 0
        if draws.places is not None:
            scores = scores[staged[num_given]]
        drawn = self.sampler.launch(scores, given, staged[:num_given]) if given else Drawn([scores], {})
        if draws.keepers is not None and last_tokens is not None:
            last_tokens.keep(staged[-1], drawn.tensors[0])
            kept = draws.sequences[draws.keepers < last_tokens.nowhere]
            self._append(batch, kept, ~batch.rows[kept])
        return drawn

    def _take_up(
        self,
        plan: SchedulerOutput,
        batch: ForwardBatch,
        draws: _Draws,
        errors_by_place: dict[int, RequestError],
        fetched: Sequence[Array],
    ) -> ModelRunnerOutput:
        """What was drawn; on the host, rows take up the first of each sequence."""
        output, sequences = self.sampler.finish(draws.given, errors_by_place, fetched), draws.sequences.tolist()
        sampled: list[tuple[int, ...]] = [()] * len(batch.rows)
        is_finite = [True] * len(batch.rows)
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        if output.logprobs is not None:
            logprobs = [()] * len(batch.rows)
            for seq, entry in zip(sequences, output.logprobs, strict=True):
                logprobs[seq] += () if entry is None else (entry,)
        errors = {plan.scheduled[sequences[i]].request_id: error for i, error in output.errors.items()}
        for seq, token_id in zip(sequences, output.token_ids, strict=True):
            sampled[seq] += (token_id,)
        kept, token_ids = batch.logits_sequences, output.token_ids
        if draws.places is not None or min(token_ids) < 0:
            kept = _drop_what_is_not_kept(plan, kept, sampled, is_finite)
            token_ids = [sampled[seq][0] for seq in kept.tolist()]
        if draws.keepers is None:
            self._append(batch, kept, token_ids)
        if draws.follow_output:
            for row, token_id in zip(batch.rows[kept].tolist(), token_ids, strict=True):
                self.sampling_rows.accept(row, token_id)
        return ModelRunnerOutput(sampled, is_finite, logprobs, errors)

    def _with_scores(self, launched: _Launched, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The output with the logprobs of prompt tokens; the step's logits are done with."""
        assert self.scorer is not None
        scores = self.scorer.score(launched.batch)
        is_finite = list(output.is_finite)
        for seq, rows in scores.items():
            is_finite[seq] = is_finite[seq] and not np.isnan(rows.logprobs[:, 0]).any()
        prompt_logprobs = {launched.plan.scheduled[seq].request_id: rows for seq, rows in scores.items()}
        return replace(output, is_finite=is_finite, prompt_logprobs=prompt_logprobs)

    def _append(
        self, batch: ForwardBatch, sequences: NDArray[np.intp], token_ids: Sequence[int] | NDArray[np.intp]
    ) -> None:
        """To the rows of these sequences of the batch, one token each."""
        rows, ends = batch.rows[sequences], batch.seq_lens[sequences]
        self.rows.token_ids[rows, ends] = token_ids
        self.rows.num_tokens[rows] = ends + 1


def _drop_what_is_not_kept(
    plan: SchedulerOutput, sequences: NDArray[np.intp], sampled: list[tuple[int, ...]], is_finite: list[bool]
) -> NDArray[np.intp]:
    """Empties `sampled` where there was nothing to draw from, and for beams, whose tokens are chosen elsewhere; returns
    the other sequences."""
    kept = []
    for seq in sequences.tolist():
        is_finite[seq] = min(sampled[seq]) >= 0
        if is_finite[seq] and plan.scheduled[seq].num_samples:
            kept.append(seq)
        else:
            sampled[seq] = ()
    return np.array(kept, np.intp)


def num_logits_rows(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Rows of logits that a step holds at a time: one a request to sample, or a slice of a prompt."""
    return min(max(max_num_seqs, SLICE_ROWS), max_num_batched_tokens)


def _repeated(counts: Sequence[int]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Each place as often as it counts, at least once, and the number of each among its equals."""
    places = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
    firsts = np.searchsorted(places, places)
    return places, (np.arange(len(places)) - firsts).astype(np.int32)
