"""Whether a model run by transformers says the same over the paged cache as with its own attention, before it is used.

Two short texts are packed into two steps, as the engine packs them. What would go wrong in silence shows here: layers
that mix neighbouring tokens or keep a state, biases by distance, positions that the model counts itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.engine.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.errors import NotSupportedError
from pagedllm.model.decoder import DecoderInput
from pagedllm.model.transformers_model import TransformersDecoder
from pagedllm.ops.attention import AttentionBackend
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.forward_batch import build_forward_batch
from pagedllm.runtime.kv_cache import KVCache
from pagedllm.runtime.metadata import MetadataBuilder
from pagedllm.sampling_params import SamplingParams

TEXTS = ((11, 7, 5, 3, 2, 13, 17, 19), (4, 6, 8, 9, 10, 12))  # ids; no longer than the smallest block
CUTS = (5, 2)  # tokens of each in the first step
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest logit


def check_against_eager(decoder: TransformersDecoder, backend: AttentionBackend, block_size: int) -> None:
    """Raises NotSupportedError where the logits of the last tokens differ."""
    texts = tuple(tuple(token_id % decoder.config.vocab_size for token_id in text) for text in TEXTS)
    found = _paged_logits(decoder, backend, block_size, texts)
    expected = torch.stack([decoder.eager_logits(text)[-1] for text in texts])
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[decoder.dtype]:
        raise NotSupportedError(
            f"{decoder.config.architecture} cannot be run by transformers over the paged cache: its logits differ from "
            f"those with its own attention by {error:.0%} of the largest"
        )


def _paged_logits(
    decoder: TransformersDecoder, backend: AttentionBackend, block_size: int, texts: tuple[tuple[int, ...], ...]
) -> Tensor:
    """[len(texts), V] of the last tokens."""
    config = decoder.config
    num_groups, longest = config.num_kv_groups, max(map(len, texts))
    kv_cache = KVCache(config, backend, num_groups * len(texts), block_size, decoder.dtype)
    rows = RequestRows(len(texts), longest, block_size, num_groups)
    data = NewRequestData(longest, SamplingParams(), seed=0)
    first, second = [], []
    for index, (text, cut) in enumerate(zip(texts, CUTS, strict=True)):
        row = rows.acquire(str(index), len(text), rope_variant=0)
        rows.append_tokens(row, text)
        rows.append_blocks(row, [(index * num_groups + group,) for group in range(num_groups)])
        first.append(ScheduledRequest(str(index), 0, cut, first_logits_index=len(text), new_request=data))
        second.append(ScheduledRequest(str(index), cut, len(text) - cut, first_logits_index=len(text) - 1))
    buffers = decoder.allocate_buffers(sum(map(len, texts)), len(texts))
    for scheduled in (first, second):
        batch = build_forward_batch(SchedulerOutput(scheduled), rows, block_size)
        inputs = DecoderInput(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            (),
            torch.from_numpy(batch.logits_indices),
        )
        logits = decoder.forward(inputs, MetadataBuilder(backend, config).build(batch), kv_cache.layers, buffers)
    kv_cache.close()
    return logits
