"""DecodeGraphs: decode steps captured once for a few batch sizes, then run again without Python or launches between.

A graph freezes pointers and shapes, so everything that differs from step to step is copied to one place of its own
that never moves: token ids, lengths, block tables, slots and work lists, padded to the graph's size. A padded sequence
has no new token for attention (cu_seqlens_q stays where it is), writes to no slot, and its row of the products is
nobody's. Work lists say on the device how many items they have. Nothing is read back or allocated inside.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.decoder import Decoder
from pagedllm.ops.attention import MERGE_COLUMNS, WORK_COLUMNS, AttentionPlan, AttentionShape
from pagedllm.ops.shared_prefix import KV_SPLIT
from pagedllm.runtime.compute_device import Gpu, Graph
from pagedllm.runtime.forward_batch import ForwardBatch
from pagedllm.runtime.last_tokens import LastTokens
from pagedllm.runtime.metadata import MetadataBuilder

LARGEST = 256  # sequences; above, a step is long enough to hide its launches
TAIL_BYTES = 256 << 10  # for the sampler's arrays, which come in the same copy
Array = NDArray[Any]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 24 ... up to the largest batch there can be."""
    largest = min(max_num_seqs, LARGEST)
    sizes = [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size < largest]
    return [*sizes, largest]


def workspace_size(num_seqs: int, max_model_len: int, shape: AttentionShape) -> int:
    """float32 elements: slots of 16 rows for each split of each sequence (ops/cuda_attention.py)."""
    num_rows = -(-(shape.num_q_heads // shape.num_kv_heads) // 16) * 16
    return num_seqs * -(-max_model_len // KV_SPLIT) * shape.num_kv_heads * num_rows * (shape.head_dim + 2)


class DecodeGraphs:
    def __init__(
        self,
        device: Gpu,
        decoder: Decoder,
        builder: MetadataBuilder,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: DecoderBuffers,
        last_tokens: LastTokens,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Captures all sizes. `builder`'s workspace, buffers and caches stay where they are from now on."""
        self.sizes = graph_sizes(max_num_seqs)
        self._builder, self._num_splits = builder, -(-max_model_len // KV_SPLIT)
        self._max_blocks = -(-max_model_len // builder.block_size)
        builder.reserve(workspace_size(self.sizes[-1], max_model_len, builder.shape))
        self._stagers = {}
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}  # with the logits
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            arrays = self._padded(size)
            stager = device.stager(sum(array.nbytes + 64 for array in arrays) + TAIL_BYTES)
            inputs, metadata = builder.tensors(stager.stage(arrays))

            def run() -> Tensor:
                last_tokens.fill(inputs.token_ids)  # noqa: B023 - called in this round
                return decoder.forward(inputs, metadata, kv_caches, buffers)  # noqa: B023 - called in this round

            logits = run()  # libraries allocate what they need at the first call
            self._graphs[size] = device.capture(run), logits
            self._stagers[size] = stager

    def serves(self, batch: ForwardBatch) -> bool:
        return batch.is_decode and len(batch.rows) <= self.sizes[-1]

    def forward(
        self, batch: ForwardBatch, rope_rows: Sequence[NDArray[np.int32]], plan: AttentionPlan, tail: Sequence[Array]
    ) -> tuple[Tensor, list[Tensor] | None]:
        """[B, V] logits as of Decoder.forward, and the tail's arrays on the device: None where they are too large."""
        num_seqs = len(batch.rows)
        size = self.sizes[bisect.bisect_left(self.sizes, num_seqs)]
        arrays = self._padded(size)
        filled = self._builder.arrays(batch, rope_rows, plan)
        for target, source in zip(arrays, filled, strict=True):
            target[tuple(map(slice, source.shape))] = source
        cu_seqlens_q = arrays[3 + len(rope_rows)]
        cu_seqlens_q[num_seqs:] = num_seqs
        fits = sum(array.nbytes + 64 for array in tail) <= TAIL_BYTES
        staged = self._stagers[size].stage([*arrays, *(tail if fits else ())])
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:num_seqs], staged[len(arrays) :] if fits else None

    def _padded(self, size: int) -> list[Array]:
        """MetadataBuilder.arrays of a batch of no sequence, in the sizes of the graph."""
        builder = self._builder
        group = builder.shape.num_q_heads // builder.shape.num_kv_heads
        tiles = size * -(-group // 16)
        # own items, and shared ones: fewer than the sequences that share them. The merge list has a place more than
        # sequences where items may be shared: that makes the launcher start their kernel.
        work = np.zeros((1 + tiles * self._num_splits * (2 if builder.shares_prefixes else 1), WORK_COLUMNS), np.int32)
        merge = np.zeros((1 + tiles + builder.shares_prefixes, MERGE_COLUMNS), np.int32)
        return [
            *(np.zeros(size, np.int32) for _ in range(2)),  # token ids, positions
            np.arange(size, dtype=np.int32),  # logits_indices
            *(np.zeros(size, np.int32) for _ in range(builder.num_ropes)),
            np.zeros(size + 1, np.int32),
            np.zeros(size, np.int32),
            work,
            merge,
            *(np.zeros((size, self._max_blocks), np.int32) for _ in range(builder.num_groups)),
            *(np.full(size, -1, np.int64) for _ in range(builder.num_groups)),
        ]
