"""EngineConfig -> numbers. Pure: it is told what the machine and the model have, and says what the engine will use.

What a user asked for and cannot have is a ValueError that names the field, the value and the largest that works;
what the user left open is chosen here, and a notice says so where it may surprise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedllm.config import EngineConfig
from pagedllm.errors import NotEnoughMemoryError, NotSupportedError
from pagedllm.kv_groups import KVGroups
from pagedllm.ops.attention import SUPPORTED_BLOCK_SIZES

GIB = 1 << 30
CPU_MAX_NUM_SEQS = 128
GPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_BATCHED_TOKENS = 8192
CPU_MAX_NUM_BATCHED_TOKENS = 512  # products run at 428 / 433 / 434 GFLOP/s at M = 128 / 512 / 2048: more buys nothing
MIN_NUM_BATCHED_TOKENS = 128  # products lose little down to here; a default batch decodes in one step
BUDGET_STEP = 64
STEP_SECONDS = 1.0  # a step stays about this long, so that an interrupt is answered
DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def binary_size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    notice: str | None  # something the user should know, or None

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def resolve_dtype(dtype: Any, kernels: str = "auto", is_cuda: bool = False) -> torch.dtype:
    """bfloat16 unless another is asked for. On a CPU that is float32 only; CUDA's kernels, emulated too, have float16.

    Where a CPU cannot multiply bfloat16 its kernels widen it.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    where, other = ("on a CPU", "float32")
    if kernels == "simt" or is_cuda:
        where, other = ("on CUDA" if is_cuda else "by kernels='simt'", "float16")
    if str(DTYPES[name]).removeprefix("torch.") not in ("bfloat16", other):
        raise NotSupportedError(f"dtype={name!r} is not supported {where}: pass dtype='bfloat16' or {other!r}")
    return DTYPES[name]


def check_block_size(block_size: int) -> None:
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {SUPPORTED_BLOCK_SIZES}, got {block_size!r}")


def resolve_max_num_seqs(config: EngineConfig, is_gpu: bool = False) -> int:
    default = GPU_MAX_NUM_SEQS if is_gpu else CPU_MAX_NUM_SEQS
    return default if config.max_num_seqs is None else config.max_num_seqs


def resolve_async_scheduling(config: EngineConfig, is_gpu: bool) -> bool:
    """On a GPU unless it is turned off. Processed logprobs are made on the host in the middle of a step."""
    return is_gpu and config.async_scheduling is not False and config.logprobs_mode == "raw_logprobs"


def resolve_max_num_batched_tokens(config: EngineConfig, seconds_at_default: float) -> int:
    """seconds_at_default: what a step of CPU_MAX_NUM_BATCHED_TOKENS tokens takes, measured."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if seconds_at_default <= STEP_SECONDS:
        return CPU_MAX_NUM_BATCHED_TOKENS
    fitting = int(CPU_MAX_NUM_BATCHED_TOKENS * STEP_SECONDS / seconds_at_default)
    return max(MIN_NUM_BATCHED_TOKENS, fitting // BUDGET_STEP * BUDGET_STEP)


def resolve_pool(
    config: EngineConfig,
    groups: KVGroups,
    *,
    max_position: int,
    bytes_per_block: int,
    free_bytes: int,
    max_num_seqs: int | None = None,
) -> PoolSize:
    """How many blocks fit, and how long a request may be.

    max_position: the length in the model's config; free_bytes: what is left for the pool after weights and buffers;
    max_num_seqs: as resolved, default what a CPU has.
    The pool takes `kv_cache_memory_bytes`, or `gpu_memory_utilization` of what is free, but never more than
    max_num_seqs requests of max_model_len could fill, and it always holds one request of max_model_len.
    """
    wanted_len = max_position if config.max_model_len is None else config.max_model_len
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ValueError(
            f"max_model_len must be at most {max_position:,}, the length in the model's config, got {wanted_len:,}"
        )
    if config.kv_cache_memory_bytes is not None:
        budget, source = config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,}"
    else:
        budget = int(free_bytes * config.gpu_memory_utilization)
        source = f"{free_bytes / GIB:.2f} GiB free x gpu_memory_utilization={config.gpu_memory_utilization}"
    num_blocks = budget // bytes_per_block
    if num_blocks < len(groups):
        number = "no block" if num_blocks < 1 else f"fewer than {len(groups)} blocks"
        raise NotEnoughMemoryError(f"no memory for a KV cache: {source} holds {number} of {bytes_per_block:,} bytes")
    notice = None
    longest = groups.longest_text(num_blocks)
    if wanted_len > longest:
        if config.max_model_len is not None:
            raise ValueError(
                f"max_model_len={wanted_len:,} does not fit: {source} holds {num_blocks:,} blocks of "
                f"{groups.block_size} tokens; the largest that fits is {longest:,}"
            )
        notice = f"max_model_len lowered from {wanted_len:,} to {longest:,}: the KV cache holds no more ({source})"
        wanted_len = longest
    usable = (max_num_seqs or resolve_max_num_seqs(config)) * groups.num_blocks(wanted_len)
    return PoolSize(min(num_blocks, usable), bytes_per_block, wanted_len, notice)
