"""DecodeTapes: the forward passes of decode steps, recorded once for each number of sequences and then run again.

On a CPU what CUDA graphs are on a GPU. A decode step of B sequences calls the same kernels on the same buffers every
time; only its inputs differ, and they are copied to where the recorded kernels read them: 128 sequences of a model of
135M parameters gain 4 %, one alone 15 %. Whoever calls this decides what is a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.decoder import Decoder, DecoderInput
from pagedllm.ops.attention import AttentionMetadata
from pagedllm.ops.tape import Tape


class DecodeTapes:
    def __init__(
        self,
        library: Path,
        decoder: Decoder,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: DecoderBuffers,
    ) -> None:
        """library: `KernelSet.path`. Buffers and caches stay where they are."""
        self._library, self._decoder, self._kv_caches, self._buffers = library, decoder, kv_caches, buffers
        self._places: list[Tensor] = []  # where the inputs of all tapes lie; they grow, and then the tapes are void
        self._workspace: Tensor | None = None  # likewise
        # by number of sequences and wants_likeliest, with what `forward` gives
        self._tapes: dict[tuple[int, bool], tuple[Tape, Tensor]] = {}

    def forward(self, inputs: DecoderInput, metadata: AttentionMetadata, wants_likeliest: bool) -> Tensor:
        """As `Decoder.forward`, of B sequences with one new token each: [B, V] logits or [B] token ids."""
        key = len(inputs.token_ids), wants_likeliest
        placed_inputs, placed_metadata = self._place(inputs, metadata)
        recorded = self._tapes.get(key)
        if recorded is not None:
            tape, result = recorded
            tape.run()
            return result
        tape = Tape(self._library)
        with tape.recording():
            result = self._decoder.forward(
                placed_inputs, placed_metadata, self._kv_caches, self._buffers, wants_likeliest
            )
        self._tapes[key] = tape, result
        return result

    def _place(self, inputs: DecoderInput, metadata: AttentionMetadata) -> tuple[DecoderInput, AttentionMetadata]:
        """The same inputs, where the tapes read them."""
        if metadata.workspace is not self._workspace:
            self._workspace = metadata.workspace
            self._tapes.clear()
        num_groups = len(metadata.block_tables)
        tensors = [
            inputs.token_ids, inputs.positions, inputs.logits_indices, *inputs.rope_rows,
            metadata.cu_seqlens_q, metadata.seq_lens, metadata.work, metadata.merge,
            *metadata.block_tables, *metadata.slot_mappings,
        ]  # fmt: skip
        self._make_room(tensors)
        views = []
        for place, tensor in zip(self._places, tensors, strict=True):
            view = place[tuple(map(slice, tensor.shape))]
            view.copy_(tensor)
            views.append(view)
        token_ids, positions, logits_indices, *rest = views
        num_ropes = len(inputs.rope_rows)
        rope_rows, (cu_seqlens_q, seq_lens, work, merge, *groups) = rest[:num_ropes], rest[num_ropes:]
        return (
            DecoderInput(token_ids, positions, tuple(rope_rows), logits_indices),
            AttentionMetadata(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                block_tables=tuple(groups[:num_groups]),
                slot_mappings=tuple(groups[num_groups:]),
                work=work,
                merge=merge,
                workspace=metadata.workspace,
            ),
        )

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        """Places of powers of two: the columns of work lists and merges are such, and stay side by side."""
        if not self._places:
            self._places = [tensor.new_empty([0] * tensor.dim()) for tensor in tensors]
        for index, (place, tensor) in enumerate(zip(self._places, tensors, strict=True)):
            if any(size > room for size, room in zip(tensor.shape, place.shape, strict=True)):
                shape = [1 << (size - 1).bit_length() for size in map(max, tensor.shape, place.shape)]
                self._places[index] = tensor.new_empty(shape)
                self._tapes.clear()
