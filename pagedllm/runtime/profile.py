"""Measures a full step before the KV cache is sized: what memory is left with its buffers in use, and its duration.

On a GPU that is a step of the whole model, and a trial of its captured decode steps.
On a CPU one layer of each kind and the LM head are run at full budget, and the durations are multiplied by
how often each occurs: the whole model would keep the user of an 8B model waiting for a minute. A model that is
run by transformers is run as a whole, once: its layers are not ours to call.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.errors import NotEnoughMemoryError
from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.causal_model import CausalModel
from pagedllm.model.config import LayerConfig
from pagedllm.model.decoder import Decoder, DecoderInput
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata
from pagedllm.runtime.compute_device import Gpu
from pagedllm.runtime.cuda_graph import DecodeGraphs, graph_sizes
from pagedllm.runtime.device import read_memory_limits
from pagedllm.runtime.forward_batch import ForwardBatch
from pagedllm.runtime.kv_cache import KVCache, bytes_per_block
from pagedllm.runtime.last_tokens import LastTokens
from pagedllm.runtime.metadata import MetadataBuilder
from pagedllm.runtime.resolve import binary_size

INDEX_BYTES = 32  # of a token of a batch: its id, position, slot and row


@dataclass(frozen=True, slots=True)
class StepProfile:
    num_tokens: int
    seconds: float  # of a step of num_tokens
    step_bytes: int  # what its buffers take
    free_bytes: int  # what the machine has left beside them


def profile_step(
    decoder: CausalModel, backend: AttentionBackend, *, block_size: int, num_tokens: int, num_logits: int
) -> StepProfile:
    """Runs zeros: num_tokens new tokens in sequences of the model's length at most, num_logits wanted.

    Raises NotEnoughMemoryError, before anything is taken, where a step can not fit.
    """
    config = decoder.config
    token_bytes = bytes_per_block(config, backend, block_size, decoder.dtype) // block_size
    token_bytes += 2 * config.hidden_size * decoder.dtype.itemsize + INDEX_BYTES
    _check_room(num_tokens, num_tokens * token_bytes + num_logits * config.vocab_size * 4, read_memory_limits().free)
    longest = min(num_tokens, config.max_position)
    batch = _full_batch(num_tokens, longest, block_size, config.num_kv_groups)
    decoder.set_rope_tables(RopeTables(config.ropes, config.max_position, longest))
    kv_cache = KVCache(config, backend, batch.block_tables[0].size, block_size, decoder.dtype)
    builder = MetadataBuilder(backend, config, block_size, torch.device("cpu"))
    arrays = builder.arrays(batch, [batch.positions] * len(config.ropes), builder.plan(batch))
    inputs, metadata = builder.tensors([torch.from_numpy(array) for array in arrays])
    buffers = decoder.allocate_buffers(num_tokens, num_logits)
    if isinstance(decoder, Decoder):
        seconds = _time_layers(decoder, inputs, metadata, kv_cache, buffers, num_logits)
        free_bytes = read_memory_limits().free
    else:
        seconds, free_bytes = _time_model(decoder, batch, metadata, kv_cache, buffers, num_logits)
    kv_cache.close()
    return StepProfile(num_tokens, seconds, buffers.num_bytes + metadata.workspace.nbytes, free_bytes)


def _check_room(num_tokens: int, least_bytes: int, free_bytes: int) -> None:
    if least_bytes > free_bytes:
        raise NotEnoughMemoryError(
            f"a step of max_num_batched_tokens={num_tokens:,} takes at least {binary_size(least_bytes)}, and "
            f"{binary_size(free_bytes)} are free: pass a smaller max_num_batched_tokens"
        )


def _time_layers(
    decoder: Decoder,
    inputs: DecoderInput,
    metadata: AttentionMetadata,
    kv_cache: KVCache,
    buffers: DecoderBuffers,
    num_logits: int,
) -> float:
    """Seconds of a step, from one layer of each kind and the head."""
    config, num_tokens = decoder.config, len(inputs.token_ids)
    rows, attention_rows = buffers.step_rows(num_tokens), buffers.attention_rows(num_tokens)
    rows.hidden.zero_()
    rows.normed.zero_()

    def run_head() -> None:
        decoder.head.apply(decoder.namespace, buffers.logits, buffers.wanted_rows(num_logits).normed)

    def run_layer(index: int) -> None:
        layer = decoder.layers[index]
        layer.attend(attention_rows, rows, inputs.rope_rows, metadata, kv_cache.layers[index])
        layer.finish(rows)

    seconds = _duration(run_head)
    kinds = [replace(layer, attention=replace(layer.attention, kv_group=0)) for layer in config.layers]
    for kind, count in Counter[LayerConfig](kinds).items():
        seconds += count * _duration(partial(run_layer, kinds.index(kind)))
    return seconds


def _time_model(
    decoder: CausalModel,
    batch: ForwardBatch,
    metadata: AttentionMetadata,
    kv_cache: KVCache,
    buffers: Any,
    num_logits: int,
) -> tuple[float, int]:
    """Seconds of a step, and the least memory that was free while its layers ran: their tensors are torch's."""
    from pagedllm.model.transformers_model import TransformersDecoder  # loaded already, where there is one

    assert isinstance(decoder, TransformersDecoder)
    inputs = DecoderInput(
        torch.from_numpy(batch.token_ids),
        torch.from_numpy(batch.positions),
        (),
        torch.arange(num_logits, dtype=torch.int32, device="cpu"),
    )
    free_bytes = [read_memory_limits().free]
    with decoder.calling_after_modules(lambda: free_bytes.append(read_memory_limits().free)):
        begin = time.perf_counter()
        decoder.forward(inputs, metadata, kv_cache.layers, buffers)
        seconds = time.perf_counter() - begin
    return seconds, min(free_bytes)


def profile_on_gpu(
    decoder: Decoder, backend: AttentionBackend, device: Gpu, *, block_size: int, num_tokens: int, num_logits: int
) -> StepProfile:
    """Runs a whole step on zeros, and looks at what the GPU's memory held while it ran."""
    config = decoder.config
    longest = min(num_tokens, config.max_position)
    batch = _full_batch(num_tokens, longest, block_size, config.num_kv_groups, num_logits)
    decoder.set_rope_tables(RopeTables(config.ropes, config.max_position, longest))
    kv_cache = KVCache(config, backend, batch.block_tables[0].size, block_size, decoder.dtype, allocate=device.allocate)
    device.trim()
    device.reset_peak()
    before = device.memory()
    builder = MetadataBuilder(backend, config, block_size, device.torch_device)
    arrays = builder.arrays(batch, [batch.positions] * len(config.ropes), builder.plan(batch))
    inputs, metadata = builder.tensors(device.stager().stage(arrays))
    buffers = decoder.allocate_buffers(num_tokens, num_logits)
    begin = time.perf_counter()
    decoder.forward(inputs, metadata, kv_cache.layers, buffers)
    device.trim()
    seconds = time.perf_counter() - begin
    step_bytes = device.memory().peak - before.allocated
    kv_cache.close()
    del builder, inputs, metadata, buffers
    device.trim()
    return StepProfile(num_tokens, seconds, step_bytes, max(0, device.memory().free - step_bytes))


def measure_graphs(
    decoder: Decoder,
    backend: AttentionBackend,
    device: Gpu,
    *,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    shares_prefixes: bool,
) -> int:
    """Bytes that captured decode steps will take, before the KV cache is there that they read.

    Captures the two largest sizes over a cache of one block, and lets them go. Nothing in a graph depends on the number
    of blocks; the smaller sizes take no more than the second: the first holds what all of them share.
    """
    config = decoder.config
    sizes = graph_sizes(max_num_seqs)
    decoder.set_rope_tables(RopeTables(config.ropes, config.max_position, max_model_len))
    builder = MetadataBuilder(backend, config, block_size, device.torch_device, shares_prefixes=shares_prefixes)
    buffers = decoder.allocate_buffers(sizes[-1], sizes[-1])
    cache = KVCache(config, backend, 1, block_size, decoder.dtype, allocate=device.allocate)
    with contextlib.closing(cache):
        trial = DecodeGraphs(
            device, decoder, builder, cache.layers, buffers, LastTokens(sizes[-1], device.torch_device),
            sizes=sizes[-2:], max_model_len=max_model_len,
        )  # fmt: skip
        num_bytes = trial.num_bytes[sizes[-1]]
        if len(sizes) > 1:
            num_bytes += trial.num_bytes[sizes[-2]] * (len(sizes) - 1)
        del trial, builder, buffers
    device.trim()
    return num_bytes


def _full_batch(
    num_tokens: int, longest: int, block_size: int, num_kv_groups: int, num_logits: int = 0
) -> ForwardBatch:
    """Prompts of `longest` tokens, the last one shorter, each in blocks of its own."""
    num_seqs = -(-num_tokens // longest)
    q_lens = np.full(num_seqs, longest, np.int32)
    q_lens[-1] = num_tokens - longest * (num_seqs - 1)
    blocks_per_seq = -(-longest // block_size)
    positions = np.arange(num_tokens, dtype=np.int32) % longest
    sequences = np.arange(num_tokens) // longest
    slots: NDArray[np.int64] = sequences * blocks_per_seq * block_size + positions
    wanted = np.arange(num_logits, dtype=np.int32)
    return ForwardBatch(
        rows=np.arange(num_seqs),
        q_lens=q_lens,
        cu_seqlens_q=np.concatenate((np.zeros(1, np.int32), q_lens.cumsum(dtype=np.int32))),
        seq_lens=q_lens,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        token_rows=sequences,
        slot_mappings=(slots,) * num_kv_groups,
        block_tables=(np.arange(num_seqs * blocks_per_seq, dtype=np.int32).reshape(num_seqs, -1),) * num_kv_groups,
        logits_indices=wanted,
        logits_sequences=sequences[wanted],
        scored_indices=wanted[:0],
        scored_sequences=sequences[:0],
    )


def _duration(run: Callable[[], None]) -> float:
    """Of the fastest of three runs after one that touches new memory: other programs can only make it longer."""
    run()
    durations = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        durations.append(time.perf_counter() - begin)
    return min(durations)
