"""Stage 6: a decode step of a 1B and an 8B shape beside its floor: the sum over its operators of the greater of
bytes / copy bandwidth and operations / peak, both of this card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagedllm.bench.model_layers import head_product, layer_products
from pagedllm.config import EngineConfig
from pagedllm.model.config import ModelConfig
from pagedllm.ops.sampling import sample
from pagedllm.runtime.forward_batch import ForwardBatch
from pagedllm.runtime.model_runner import ModelRunner
from pagedllm.runtime.startup import start
from tests.device.kernels import Ceilings, measure_ceilings
from tests.device.models import RandomCheckpoint
from tests.device.results import STEP_1B, STEP_8B, Budget, Results
from tests.device.sizes import Shape
from tests.device.target import Target

ELEMENT = 2  # bytes, of weights, activations, keys
STEPS_A_RUN = 5
GIB = 1 << 30
AIMS = {"8B": STEP_8B}


def run(target: Target, results: Results, budget: Budget) -> None:
    target.load()
    with torch.inference_mode():
        ceilings = measure_ceilings(target)
    for shape in target.sizes.shapes:
        if budget.allows(results, f"decode steps of {shape.name}", 10 + num_model_bytes(shape) / 1e9):
            with results.check_figure(f"decode steps of {shape.name}"):
                measure_shape(target, results, budget, ceilings, shape)


def num_model_bytes(shape: Shape) -> int:
    queries_and_keys = (2 * shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = shape.hidden_size * (queries_and_keys + 3 * shape.intermediate_size)
    return ELEMENT * (shape.num_layers * layer + (2 - shape.is_tied) * shape.vocab_size * shape.hidden_size)


def measure_shape(target: Target, results: Results, budget: Budget, ceilings: Ceilings, shape: Shape) -> None:
    sizes = target.sizes
    context = fitting_context(target, results, shape)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ELEMENT
    max_num_seqs = max(sizes.step_batches)
    config = EngineConfig(
        model=f"random-{shape.name}",
        **target.settings,
        max_num_seqs=max_num_seqs,
        max_model_len=context,
        max_num_batched_tokens=max(sizes.step_budget, max_num_seqs),
        kv_cache_memory_bytes=(max_num_seqs * context + 64) * token_bytes,
        enable_prefix_caching=False,
    )
    with target.opening():
        runtime = start(config, RandomCheckpoint(shape))
    try:
        for k_and_v in runtime.runner.kv_cache.tensors:
            for cache in k_and_v:
                cache.normal_()
        for num_seqs in sizes.step_batches:
            name = f"decode step of {shape.name}, {num_seqs} x {context} keys"
            if budget.allows(results, name, 3):
                seconds = time_step(target, runtime.runner, num_seqs, context)
                floor = sum(
                    max(part.num_bytes / ceilings.bandwidth, part.flops / ceilings.peak)
                    for part in step_parts(runtime.model_config, num_seqs, context)
                )
                note = f"{seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms"
                results.figure(name, seconds / floor, "x floor", AIMS.get(shape.name, STEP_1B), note)
        if budget.allows(results, f"sampling for {shape.name}", 2):
            seconds = time_sampling(target, max_num_seqs, shape.vocab_size)
            results.figure(f"sampling, {max_num_seqs} x {shape.vocab_size}", seconds * 1e6, "us", note="greedy")
    finally:
        runtime.close()


def fitting_context(target: Target, results: Results, shape: Shape) -> int:
    """Halved until weights and keys fit into three quarters of the memory."""
    wanted = context = target.sizes.step_context
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ELEMENT
    room = target.gpu().memory().free * 3 // 4 - num_model_bytes(shape)
    while context > 64 and max(target.sizes.step_batches) * context * token_bytes > room:
        context //= 2
    if context < wanted:
        results.cut(f"context of {shape.name}", f"{context} keys instead of {wanted}: memory")
    return context


def time_step(target: Target, runner: ModelRunner, num_seqs: int, context: int) -> float:
    """Seconds of a step on the device, of several behind each other: the host is ahead while a step is long enough."""
    batch = decode_batch(num_seqs, context, runner.kv_cache.block_size)
    assert runner.decode_graphs is not None
    assert runner.decode_graphs.serves(batch), "no graph for this batch"

    def steps() -> None:
        for _ in range(STEPS_A_RUN):
            logits, _ = runner.forward(batch, [])
        assert len(logits) == num_seqs

    with torch.inference_mode():
        return target.median(steps) / STEPS_A_RUN


def decode_batch(num_seqs: int, context: int, block_size: int) -> ForwardBatch:
    """The last of `context` tokens of each sequence, in blocks that lie about."""
    blocks_per_seq = -(-context // block_size)
    order = np.random.default_rng(0).permutation(num_seqs * blocks_per_seq).astype(np.int32)
    tables = order.reshape(num_seqs, blocks_per_seq)
    sequences = np.arange(num_seqs)
    last = context - 1
    slots = tables[:, last // block_size].astype(np.int64) * block_size + last % block_size
    return ForwardBatch(
        rows=sequences,
        q_lens=np.ones(num_seqs, np.int32),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=np.full(num_seqs, context, np.int32),
        token_ids=(sequences % 300 + 3).astype(np.int32),
        positions=np.full(num_seqs, last, np.int32),
        token_rows=sequences,
        slot_mappings=(slots,),
        block_tables=(tables,),
        logits_indices=np.arange(num_seqs, dtype=np.int32),
        logits_sequences=sequences,
        scored_indices=np.zeros(0, np.int32),
        scored_sequences=np.zeros(0, np.intp),
    )


def time_sampling(target: Target, num_rows: int, vocab_size: int) -> float:
    device = target.device
    with torch.inference_mode():
        logits = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device).normal_().mul_(3)
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        temperature, min_p = (torch.zeros(num_rows, dtype=torch.float32, device=device) for _ in range(2))
        top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        seed = torch.arange(num_rows, dtype=torch.int64, device=device)
        counter = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        arguments = (token_ids, logits, temperature, top_k, top_p, min_p, seed, counter)
        return target.median_captured(lambda: sample(target.namespace, *arguments))


@dataclass(frozen=True)
class Part:
    """Of a step: an operator, as often as it is run."""

    num_bytes: float
    flops: float


def step_parts(config: ModelConfig, num_seqs: int, context: int) -> Iterator[Part]:
    """Weights once, rows in and out of each operator; keys and values once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = [
        Part(
            ELEMENT * (item.num_weights + num_seqs * (item.shape.in_features + sum(item.shape.part_sizes))),
            2.0 * num_seqs * item.num_weights,
        )
        for item in layer_products(config).values()
    ]
    layer += [
        Part(ELEMENT * num_seqs * 4 * hidden, 0),  # residual and norm, twice
        Part(ELEMENT * num_seqs * 4 * hidden, 0),
        Part(ELEMENT * num_seqs * 2 * (queries + 2 * keys), 0),  # rotation and the write of keys
        Part(ELEMENT * num_seqs * 3 * inner, 0),  # activation
        Part(ELEMENT * num_seqs * 2 * (context * keys + queries), 4.0 * num_seqs * context * queries),
    ]
    for part in layer:
        yield Part(config.num_layers * part.num_bytes, config.num_layers * part.flops)
    yield Part(ELEMENT * num_seqs * 2 * hidden, 0)  # embedding
    head = head_product(config).num_weights
    logit_bytes = 4 * num_seqs * config.vocab_size
    yield Part(ELEMENT * (head + num_seqs * hidden) + logit_bytes, 2.0 * num_seqs * head)
