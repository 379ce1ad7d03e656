"""DecodeTapes: the forward passes of decode steps, recorded once for each number of sequences and then run again.

On a CPU what CUDA graphs are on a GPU. A decode step of B sequences calls the same kernels on the same buffers every
time; only its inputs differ, and they are copied to where the recorded kernels read them: 128 sequences of a model of
135M parameters gain 4 %, one alone 15 %. Whoever calls this decides what is a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.decoder import Decoder
from pagedllm.ops.tape import Tape
from pagedllm.runtime.metadata import MetadataBuilder

Array = NDArray[Any]


class DecodeTapes:
    def __init__(
        self,
        library: Path,
        decoder: Decoder,
        builder: MetadataBuilder,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: DecoderBuffers,
    ) -> None:
        """library: `KernelSet.path`. Buffers and caches stay where they are."""
        self._library, self._decoder, self._builder = library, decoder, builder
        self._kv_caches, self._buffers = kv_caches, buffers
        self._places: list[Array] = []  # where the inputs of all tapes lie; they grow, and then the tapes are void
        self._workspace: Tensor | None = None  # likewise
        # by number of sequences and wants_likeliest, with what `forward` gives
        self._tapes: dict[tuple[int, bool], tuple[Tape, Tensor]] = {}

    def forward(self, arrays: Sequence[Array], wants_likeliest: bool) -> Tensor:
        """As `Decoder.forward`, of B sequences with one new token each: [B, V] logits or [B] token ids.

        arrays: of `MetadataBuilder.arrays`.
        """
        key = len(arrays[0]), wants_likeliest
        views = self._place(arrays)
        recorded = self._tapes.get(key)
        if recorded is not None:
            tape, result = recorded
            tape.run()
            return result
        inputs, metadata = self._builder.tensors([torch.from_numpy(view) for view in views])
        tape = Tape(self._library)
        with tape.recording():
            result = self._decoder.forward(inputs, metadata, self._kv_caches, self._buffers, wants_likeliest)
        self._tapes[key] = tape, result
        return result

    def _place(self, arrays: Sequence[Array]) -> list[Array]:
        """The same arrays, where the tapes read them."""
        if self._builder.workspace is not self._workspace:
            self._workspace = self._builder.workspace
            self._tapes.clear()
        self._make_room(arrays)
        views = []
        for place, array in zip(self._places, arrays, strict=True):
            view = place[tuple(map(slice, array.shape))]
            view[...] = array
            views.append(view)
        return views

    def _make_room(self, arrays: Sequence[Array]) -> None:
        """Places of powers of two: the columns of work lists and merges are such, and stay side by side."""
        if not self._places:
            self._places = [np.empty([0] * array.ndim, array.dtype) for array in arrays]
        for index, (place, array) in enumerate(zip(self._places, arrays, strict=True)):
            if any(size > room for size, room in zip(array.shape, place.shape, strict=True)):
                shape = [1 << (size - 1).bit_length() for size in map(max, array.shape, place.shape)]
                self._places[index] = np.empty(shape, array.dtype)
                self._tapes.clear()
