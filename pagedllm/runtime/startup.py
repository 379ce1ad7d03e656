"""From an EngineConfig to a runner that is ready: kernels, weights, a measured step, the KV cache.

Called once by LLM. Order matters for memory: what the weights and a full step need is there before the pool is sized,
so the pool gets what is really left.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.config import EngineConfig
from pagedllm.kv_groups import UNBOUNDED, KVGroups
from pagedllm.model.causal_model import CausalModel
from pagedllm.model.checkpoint import Checkpoint
from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import Decoder
from pagedllm.model.dense_format import DenseFormat
from pagedllm.model.linear import PackedFormat, WeightFormat
from pagedllm.model.loader import load_model
from pagedllm.model.registry import has_family
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionBackend, CpuAttentionBackend
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from pagedllm.ops.library import KernelSet, load_kernels
from pagedllm.runtime.device import read_thread_limits, torch_threads
from pagedllm.runtime.kv_cache import KVCache, TextMemory, bytes_per_block, text_memory
from pagedllm.runtime.model_runner import ModelRunner, num_logits_rows
from pagedllm.runtime.profile import StepProfile, profile_step
from pagedllm.runtime.resolve import (
    CPU_MAX_NUM_BATCHED_TOKENS,
    GIB,
    PoolSize,
    check_block_size,
    resolve_device,
    resolve_dtype,
    resolve_max_num_batched_tokens,
    resolve_max_num_seqs,
    resolve_pool,
)

MIB = 1 << 20
logger = logging.getLogger("pagedllm")


@dataclass(slots=True)
class Runtime:
    """What LLM builds its engine from. `close` gives all memory back."""

    runner: ModelRunner
    model_config: ModelConfig
    kernels: KernelSet
    dtype: torch.dtype
    pool: PoolSize
    text_memory: TextMemory  # of a text of max_model_len
    rope_tables: RopeTables
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase of the start

    def rope_variant(self, num_total_tokens: int | None) -> int:
        """The rotation table of a request; num_total_tokens: prompt + max_tokens, None without a limit."""
        return self.rope_tables.variant(num_total_tokens)

    @property
    def model_impl(self) -> str:
        """Who computes the model."""
        return "pagedllm" if isinstance(self.runner.decoder, Decoder) else "transformers"

    @property
    def is_deterministic(self) -> bool:
        """Whether a token depends on nothing but its request."""
        return self.runner.decoder.is_batch_invariant

    def close(self) -> None:
        self.runner.close()


def start(config: EngineConfig, checkpoint: Checkpoint) -> Runtime:
    """Builds everything but the engine. Raises ValueError, ModelError, LibraryError or NotSupportedError, by name."""
    resolve_device(config.device)
    check_block_size(config.block_size)
    dtype = resolve_dtype(config.dtype, config.kernels)
    num_threads = config.num_threads or read_thread_limits().num_threads
    max_num_seqs = resolve_max_num_seqs(config)
    full_step = config.max_num_batched_tokens or CPU_MAX_NUM_BATCHED_TOKENS
    clock = _Clock()
    kernels = load_kernels(config.kernels)
    backend, weight_format = choose_formats(kernels, dtype)
    clock.lap("kernels")
    with torch_threads(num_threads), torch.inference_mode():
        decoder = _load(config, checkpoint, dtype, backend, kernels, weight_format)
        clock.lap("weights")
        profile = profile_step(
            decoder,
            backend,
            block_size=config.block_size,
            num_tokens=full_step,
            num_logits=num_logits_rows(max_num_seqs, full_step),
        )
        clock.lap("profile")
    max_num_batched_tokens = resolve_max_num_batched_tokens(config, profile.seconds)
    block_bytes = bytes_per_block(decoder.config, backend, config.block_size, dtype)
    groups = KVGroups(config.block_size, decoder.config.kv_windows, max_num_batched_tokens)
    pool = resolve_pool(
        config,
        groups,
        max_position=decoder.config.max_position,
        bytes_per_block=block_bytes,
        free_bytes=profile.free_bytes,
    )
    rope_tables = RopeTables(decoder.config.ropes, decoder.config.max_position, pool.max_model_len)
    decoder.set_rope_tables(rope_tables)
    can_record = kernels.namespace == "pagedllm" and decoder.runs_only_kernels
    runner = ModelRunner(
        decoder,
        backend,
        kernels.namespace,
        KVCache(decoder.config, backend, pool.num_blocks, config.block_size, dtype),
        _rope_row_offsets(rope_tables),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=pool.max_model_len,
        num_threads=num_threads,
        logprobs_mode=config.logprobs_mode,
        recorder=kernels.path if can_record and not config.enforce_eager else None,
    )
    clock.lap("kv_cache")
    longest = text_memory(decoder.config, groups, pool.max_model_len, block_bytes)
    _tell(decoder, pool, longest, profile, config.block_size, dtype)
    return Runtime(
        runner=runner,
        model_config=decoder.config,
        kernels=kernels,
        dtype=dtype,
        pool=pool,
        text_memory=longest,
        rope_tables=rope_tables,
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
        seconds=clock.laps,
    )


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    backend: AttentionBackend,
    kernels: KernelSet,
    weight_format: WeightFormat,
) -> CausalModel:
    """Our decoder, or transformers' model where that is asked for or no family here knows the architecture."""
    max_model_len = config.max_model_len or UNBOUNDED
    if config.model_impl != "transformers" and (config.model_impl == "pagedllm" or has_family(checkpoint.config)):
        return load_model(checkpoint, dtype, backend, kernels.namespace, weight_format, max_model_len)
    from pagedllm.model.transformers_model import knows, load_transformers_model  # 1.5 s
    from pagedllm.runtime.eager_check import check_against_eager

    if config.model_impl == "auto" and not knows(checkpoint.config):
        return load_model(checkpoint, dtype, backend, kernels.namespace, weight_format, max_model_len)
    if config.deterministic:
        raise ValueError(
            "deterministic=True is refused with a model run by transformers: torch's products depend on the batch; "
            "leave it None"
        )
    decoder = load_transformers_model(checkpoint, dtype, backend, kernels.namespace, max_model_len)
    check_against_eager(decoder, backend, config.block_size)
    if config.model_impl == "auto":
        logger.warning(
            "%s is run by transformers, with its attention over the paged cache: pagedllm has no family for it, so it "
            "is slower, and results may differ with the batch",
            decoder.config.architecture,
        )
    return decoder


def choose_formats(kernels: KernelSet, dtype: torch.dtype) -> tuple[AttentionBackend, WeightFormat]:
    """How the KV cache and the weights lie: as the CPU's kernels want them, or as CUDA's do."""
    if kernels.namespace == "pagedllm_simt":
        return CudaAttentionBackend(kernels.namespace), DenseFormat(dtype)
    return CpuAttentionBackend(kernels.namespace), PackedFormat(dtype)


def _rope_row_offsets(tables: RopeTables) -> list[NDArray[np.int32]]:
    """Per rope: [num_variants] int32, where each variant begins in its table."""
    variants = range(tables.num_variants)
    return [
        np.array([tables.row_offset(rope, variant) for variant in variants], np.int32)
        for rope in range(len(tables.tables))
    ]


def _tell(
    decoder: CausalModel,
    pool: PoolSize,
    longest: TextMemory,
    profile: StepProfile,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """One line with the parts of the memory, and a notice where something was lowered."""
    config = decoder.config
    logger.info(
        "memory: weights %.2f GiB, step buffers %.2f GiB, KV cache up to %.2f GiB of %.2f GiB free: %s blocks of "
        "%d tokens, %s bytes each (2 x %d tokens x %d KV heads x %d x %d bytes x %d layers); a text of %s tokens takes "
        "%.2f MiB, %.2f MiB if layers with a window kept all of it",
        decoder.num_weight_bytes / GIB,
        profile.step_bytes / GIB,
        pool.num_bytes / GIB,
        profile.free_bytes / GIB,
        f"{pool.num_blocks:,}",
        block_size,
        f"{pool.bytes_per_block:,}",
        block_size,
        config.num_kv_heads,
        config.head_dim,
        dtype.itemsize,
        config.num_layers_per_block,
        f"{pool.max_model_len:,}",
        longest.num_bytes / MIB,
        longest.num_bytes_without_windows / MIB,
    )
    if pool.notice:
        logger.warning(pool.notice)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
