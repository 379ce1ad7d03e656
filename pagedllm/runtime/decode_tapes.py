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
        """library: `KernelSet.path`; decoder.runs_only_kernels holds. Buffers and caches stay where they are."""
        self._library, self._decoder, self._kv_caches, self._buffers = library, decoder, kv_caches, buffers
        self._places: list[Tensor] = []  # where the inputs of all tapes lie; they grow, and then the tapes are void
        self._workspace: Tensor | None = None  # likewise
        self._tapes: dict[int, tuple[Tape, Tensor]] = {}  # by number of sequences, with the logits

    def forward(self, inputs: DecoderInput, metadata: AttentionMetadata) -> Tensor:
        """As `Decoder.forward`: [B, V] logits of B sequences with one new token each."""
        num_seqs = len(inputs.token_ids)
        placed_inputs, placed_metadata = self._place(inputs, metadata)
        recorded = self._tapes.get(num_seqs)
        if recorded is not None:
            tape, logits = recorded
            tape.run()
            return logits
        tape = Tape(self._library)
        with tape.recording():
            logits = self._decoder.forward(placed_inputs, placed_metadata, self._kv_caches, self._buffers)
        self._tapes[num_seqs] = tape, logits
        return logits

    def _place(self, inputs: DecoderInput, metadata: AttentionMetadata) -> tuple[DecoderInput, AttentionMetadata]:
        """The same inputs, where the tapes read them."""
        if metadata.workspace is not self._workspace:
            self._workspace = metadata.workspace
            self._tapes.clear()
        tensors = [
            inputs.token_ids, inputs.positions, inputs.logits_indices, *inputs.rope_rows,
            metadata.cu_seqlens_q, metadata.seq_lens, *metadata.block_tables, *metadata.slot_mappings,
            *dict.fromkeys(metadata.work), *dict.fromkeys(metadata.merge),  # groups have lists in common
        ]  # fmt: skip
        self._make_room(tensors)
        placed = {}
        for place, tensor in zip(self._places, tensors, strict=True):
            view = place[tuple(map(slice, tensor.shape))]
            view.copy_(tensor)
            placed[tensor] = view

        def places(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(placed[tensor] for tensor in given)

        return (
            DecoderInput(
                placed[inputs.token_ids],
                placed[inputs.positions],
                places(inputs.rope_rows),
                placed[inputs.logits_indices],
            ),
            AttentionMetadata(
                cu_seqlens_q=placed[metadata.cu_seqlens_q],
                seq_lens=placed[metadata.seq_lens],
                block_tables=places(metadata.block_tables),
                slot_mappings=places(metadata.slot_mappings),
                work=places(metadata.work),
                merge=places(metadata.merge),
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
