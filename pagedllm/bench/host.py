"""The host's share of a step: the real engine, scheduler and ModelRunner around a decoder that computes nothing.

What is timed is all of a step but the model's forward pass: scheduling, plans and work lists, the sampler's own
bookkeeping, taking the results up. Every request decodes, none ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.core import EngineCore
from pagedllm.engine.policy import make_policy
from pagedllm.engine.scheduler import Scheduler
from pagedllm.model.buffers import DecoderBuffers
from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.decoder import Decoder, DecoderInput
from pagedllm.ops.attention import AttentionMetadata, CpuAttentionBackend
from pagedllm.ops.linear import Activation
from pagedllm.request import Request
from pagedllm.runtime.compute_device import HostDevice
from pagedllm.runtime.kv_cache import KVCache
from pagedllm.runtime.model_runner import ModelRunner
from pagedllm.sampling_params import SamplingParams

NUM_RUNNING = (1, 64, 128, 256, 1024)
NUM_PROMPT_TOKENS = 32
NUM_STEPS = 32  # of a round: two blocks of 16 for each request
NUM_ROUNDS = 3
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
VOCAB_SIZE = 64


@dataclass(frozen=True, slots=True)
class HostResult:
    """Seconds a step, means of the fastest of NUM_ROUNDS rounds of NUM_STEPS steps."""

    num_running: int
    num_waiting: int
    step_seconds: float
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float


class NoDecoder(Decoder):
    """Every token is 0."""

    def forward(
        self,
        inputs: DecoderInput,
        metadata: AttentionMetadata,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: DecoderBuffers,
        wants_likeliest: bool = False,
    ) -> Tensor:
        assert wants_likeliest
        return buffers.token_ids[: len(inputs.logits_indices)]


class NoText:
    """A Detokenizer that nobody asks: requests want no text."""

    def decode(self, request: Request) -> str:
        raise AssertionError("no request asks for text")

    def stream(self, request: Request) -> NoText:
        raise AssertionError("no request streams")

    def push(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("no request streams")

    def finish(self) -> str:
        raise AssertionError("no request streams")


def measure_host(num_running: int, num_waiting: int, namespace: str, num_threads: int) -> HostResult:
    """num_running requests decode while num_waiting others wait."""
    engine, runner = _make_engine(num_running, namespace, num_threads)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_MODEL_LEN, detokenize=False)
    for index in range(num_running + num_waiting):
        engine.add_request(_make_request(index, params))
    while engine.stats.num_running < num_running:
        engine.step()
    try:
        return min((_measure_round(engine) for _ in range(NUM_ROUNDS)), key=lambda result: result.step_seconds)
    finally:
        runner.close()


def _measure_round(engine: EngineCore) -> HostResult:
    before = engine.stats.copy()
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    seconds = time.perf_counter() - begin
    after = engine.stats
    return HostResult(
        after.num_running,
        after.num_waiting,
        seconds / NUM_STEPS,
        (after.schedule_seconds - before.schedule_seconds) / NUM_STEPS,
        (after.execute_seconds - before.execute_seconds) / NUM_STEPS,
        (after.update_seconds - before.update_seconds) / NUM_STEPS,
    )


def _make_request(index: int, params: SamplingParams) -> Request:
    prompt = [(index + position) % VOCAB_SIZE for position in range(NUM_PROMPT_TOKENS)]
    return Request(
        str(index), prompt, NUM_PROMPT_TOKENS, params, MAX_MODEL_LEN - NUM_PROMPT_TOKENS, extra_keys=(index,)
    )


def _make_engine(num_running: int, namespace: str, num_threads: int) -> tuple[EngineCore, ModelRunner]:
    config = ModelConfig(
        architecture="none",
        hidden_size=64,
        intermediate_size=64,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position=MAX_MODEL_LEN,
        norm_eps=1e-5,
        activation=Activation.SILU,
        layers=(LayerConfig(AttentionKind()),),
        attention_scale=0.125,
        is_tied=True,
    )
    num_blocks = num_running * (MAX_MODEL_LEN // BLOCK_SIZE)
    budget = max(512, 2 * num_running)  # admission is not what is timed
    backend = CpuAttentionBackend(namespace)
    runner = ModelRunner(
        NoDecoder(config, torch.float32, backend, namespace),
        backend,
        namespace,
        KVCache(config, backend, num_blocks, BLOCK_SIZE, torch.float32),
        [np.zeros(1, np.int32)],
        max_num_seqs=num_running,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        num_threads=num_threads,
        recorder=None,
        device=HostDevice(),
        shares_prefixes=False,
        captures_graphs=False,
    )
    runner.buffers.token_ids.zero_()
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=num_running,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        policy=make_policy("fcfs"),
    )
    return EngineCore(scheduler, runner.execute, NoText()), runner
