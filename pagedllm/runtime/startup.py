"""From an EngineConfig to a runner that is ready: kernels, weights, a measured step, the KV cache.

Called once by LLM. Order matters for memory: what the weights and a full step need is there before the pool is sized,
so the pool gets what is really left.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedllm.config import EngineConfig
from pagedllm.errors import NotSupportedError
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
from pagedllm.ops.attention import AttentionBackend, AttentionShape, CpuAttentionBackend
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from pagedllm.ops.library import KernelSet, load_cuda_kernels, load_kernels
from pagedllm.runtime.compute_device import ComputeDevice, Gpu, open_device, out_of_memory
from pagedllm.runtime.cuda_graph import graph_sizes, workspace_size
from pagedllm.runtime.device import read_thread_limits, torch_threads
from pagedllm.runtime.kv_cache import KVCache, TextMemory, bytes_per_block, text_memory
from pagedllm.runtime.model_runner import ModelRunner, num_logits_rows
from pagedllm.runtime.probe import varying_products
from pagedllm.runtime.profile import StepProfile, profile_on_gpu, profile_step
from pagedllm.runtime.resolve import (
    CPU_MAX_NUM_BATCHED_TOKENS,
    GIB,
    GPU_MAX_NUM_BATCHED_TOKENS,
    PoolSize,
    check_block_size,
    resolve_async_scheduling,
    resolve_dtype,
    resolve_max_num_batched_tokens,
    resolve_max_num_seqs,
    resolve_pool,
)

MIB = 1 << 20
logger = logging.getLogger("pagedllm")
GRAPH_LAYER_BYTES = 64 << 10  # of a captured step, a layer: a guess until it can be measured


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
    device_name: str
    is_deterministic: bool  # a token depends on nothing but its request
    overlaps_steps: bool  # the next step is planned while one runs
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase of the start

    def rope_variant(self, num_total_tokens: int | None) -> int:
        """The rotation table of a request; num_total_tokens: prompt + max_tokens, None without a limit."""
        return self.rope_tables.variant(num_total_tokens)

    @property
    def model_impl(self) -> str:
        """Who computes the model."""
        return "pagedllm" if isinstance(self.runner.decoder, Decoder) else "transformers"

    def close(self) -> None:
        self.runner.close()


def start(config: EngineConfig, checkpoint: Checkpoint) -> Runtime:
    """Builds everything but the engine.

    Raises ValueError, ModelError, LibraryError, NotSupportedError or NotEnoughMemoryError, by name.
    """
    device = open_device(config.device)
    check_block_size(config.block_size)
    dtype = resolve_dtype(config.dtype, config.kernels, device.torch_device.type == "cuda")
    try:
        return _start(config, checkpoint, device, dtype)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(device, error) from error


def _start(config: EngineConfig, checkpoint: Checkpoint, device: ComputeDevice, dtype: torch.dtype) -> Runtime:
    num_threads = config.num_threads or read_thread_limits().num_threads
    max_num_seqs = resolve_max_num_seqs(config, device.is_gpu)
    default_step = GPU_MAX_NUM_BATCHED_TOKENS if device.is_gpu else CPU_MAX_NUM_BATCHED_TOKENS
    full_step = config.max_num_batched_tokens or default_step
    clock = _Clock()
    kernels = load_cuda_kernels(config.kernels) if device.torch_device.type == "cuda" else load_kernels(config.kernels)
    backend, weight_format = choose_formats(kernels, dtype, bool(config.deterministic) or not device.is_gpu)
    clock.lap("kernels")
    sizes = {
        "block_size": config.block_size,
        "num_tokens": full_step,
        "num_logits": num_logits_rows(max_num_seqs, full_step),
    }
    with torch_threads(num_threads), contextlib.ExitStack() as on_failure:
        with torch.inference_mode():
            decoder = _load(config, checkpoint, dtype, backend, kernels, weight_format, device, num_threads)
            on_failure.callback(decoder.close)
            clock.lap("weights")
            if isinstance(device, Gpu):
                assert isinstance(decoder, Decoder)
                profile = profile_on_gpu(decoder, backend, device, **sizes)
                max_num_batched_tokens = full_step
            else:
                profile = profile_step(decoder, backend, **sizes)
                max_num_batched_tokens = resolve_max_num_batched_tokens(config, profile.seconds)
        clock.lap("profile")
        captures_graphs = device.is_gpu and not config.enforce_eager and decoder.config.moe is None
        graph_bytes = 0
        if captures_graphs:
            max_len = min(config.max_model_len or decoder.config.max_position, decoder.config.max_position)
            graph_bytes = estimate_graph_bytes(decoder.config, max_num_seqs, max_len)
        block_bytes = bytes_per_block(decoder.config, backend, config.block_size, dtype)
        groups = KVGroups(config.block_size, decoder.config.kv_windows, max_num_batched_tokens)
        pool = resolve_pool(
            config,
            groups,
            max_position=decoder.config.max_position,
            bytes_per_block=block_bytes,
            free_bytes=max(0, profile.free_bytes - graph_bytes),
            max_num_seqs=max_num_seqs,
        )
        rope_tables = RopeTables(decoder.config.ropes, decoder.config.max_position, pool.max_model_len)
        decoder.set_rope_tables(rope_tables)
        can_record = kernels.namespace == "pagedllm" and not device.is_gpu
        kv_cache = KVCache(decoder.config, backend, pool.num_blocks, config.block_size, dtype, allocate=device.allocate)
        on_failure.callback(kv_cache.close)
        runner = ModelRunner(
            decoder,
            backend,
            kernels.namespace,
            kv_cache,
            _rope_row_offsets(rope_tables),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=pool.max_model_len,
            num_threads=num_threads,
            logprobs_mode=config.logprobs_mode,
            recorder=kernels.path if can_record and not config.enforce_eager else None,
            device=device,
            shares_prefixes=config.enable_prefix_caching,
            captures_graphs=captures_graphs,
        )
        is_deterministic = _find_determinism(config, device, decoder)
        on_failure.pop_all()
    clock.lap("kv_cache")
    longest = text_memory(decoder.config, groups, pool.max_model_len, block_bytes)
    _tell(decoder, device, pool, longest, profile, graph_bytes, config.block_size, dtype)
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
        device_name=device.name,
        is_deterministic=is_deterministic,
        overlaps_steps=resolve_async_scheduling(config, device.is_gpu),
        seconds=clock.laps,
    )


def _find_determinism(config: EngineConfig, device: ComputeDevice, decoder: CausalModel) -> bool:
    """Whether a token depends on nothing but its request: not where products are torch's (the twins, emulation), and on
    a GPU only as far as a probe of its products says."""
    if not device.is_gpu:
        return decoder.is_batch_invariant
    if not config.deterministic:
        return False
    assert isinstance(decoder, Decoder)
    varying = varying_products(decoder)
    if varying:
        logger.warning(
            "deterministic=True: attention, norms and sampling are exact, but on %s a row of these products depends on "
            "the size of its batch: %s",
            device.name,
            ", ".join(varying),
        )
    return not varying


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    backend: AttentionBackend,
    kernels: KernelSet,
    weight_format: WeightFormat,
    device: ComputeDevice,
    num_threads: int,
) -> CausalModel:
    """Our decoder, or transformers' model."""
    max_model_len = config.max_model_len or UNBOUNDED
    if not is_run_by_transformers(config.model_impl, checkpoint.config):
        with torch_threads(1):
            return load_model(
                checkpoint,
                dtype,
                backend,
                kernels.namespace,
                weight_format,
                max_model_len,
                device.allocate,
                num_threads,
            )
    from pagedllm.model.transformers_model import load_transformers_model  # 1.5 s
    from pagedllm.runtime.eager_check import check_against_eager

    if device.is_gpu:
        raise NotSupportedError(f"{checkpoint.path}: a model run by transformers is not supported on a GPU: take a CPU")
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


def is_run_by_transformers(model_impl: str, settings: Mapping[str, Any]) -> bool:
    """Where that is asked for, or where transformers knows the architecture of config.json and no family here does."""
    if model_impl != "auto" or has_family(settings):
        return model_impl == "transformers"
    from pagedllm.model.transformers_model import knows  # 1.5 s

    return knows(settings)


def choose_formats(
    kernels: KernelSet, dtype: torch.dtype, deterministic: bool = True
) -> tuple[AttentionBackend, WeightFormat]:
    """How the KV cache and the weights lie: as the CPU's kernels want them, or as CUDA's do."""
    if kernels.name in ("simt", "cuda"):
        return CudaAttentionBackend(kernels.namespace, deterministic), DenseFormat(dtype)
    return CpuAttentionBackend(kernels.namespace), PackedFormat(dtype)


def _rope_row_offsets(tables: RopeTables) -> list[NDArray[np.int32]]:
    """Per rope: [num_variants] int32, where each variant begins in its table."""
    variants = range(tables.num_variants)
    return [
        np.array([tables.row_offset(rope, variant) for variant in variants], np.int32)
        for rope in range(len(tables.tables))
    ]


def estimate_graph_bytes(config: ModelConfig, max_num_seqs: int, max_model_len: int) -> int:
    """What captured decode steps will take: their workspace, and what the driver keeps for each kernel's launch."""
    sizes = graph_sizes(max_num_seqs)
    shape = AttentionShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
    return workspace_size(sizes[-1], max_model_len, shape) * 4 + len(sizes) * config.num_layers * GRAPH_LAYER_BYTES


def _tell(
    decoder: CausalModel,
    device: ComputeDevice,
    pool: PoolSize,
    longest: TextMemory,
    profile: StepProfile,
    graph_bytes: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """One line with the parts of the memory, and a notice where something was lowered."""
    config = decoder.config
    if isinstance(device, Gpu):
        state = device.memory()
        logger.info(
            "%s: %.2f GiB in all, %.2f GiB used by others, weights %.2f GiB, a full step's peak %.2f GiB, graphs about "
            "%.2f GiB, KV cache %.2f GiB",
            device.name,
            state.total / GIB,
            max(0, state.total - state.free - state.allocated) / GIB,
            decoder.num_weight_bytes / GIB,
            profile.step_bytes / GIB,
            graph_bytes / GIB,
            pool.num_bytes / GIB,
        )
    whole = f", {longest.num_bytes_without_windows / MIB:.2f} MiB if layers with a window kept all of it"
    logger.info(
        "memory: weights %.2f GiB, step buffers %.2f GiB, KV cache up to %.2f GiB of %.2f GiB free: %s blocks of "
        "%d tokens, %s bytes each (2 x %d tokens x %d KV heads x %d x %d bytes x %d layers); a text of %s tokens takes "
        "%.2f MiB%s",
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
        whole if longest.num_bytes < longest.num_bytes_without_windows else "",
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
