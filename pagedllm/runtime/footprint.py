"""What a model takes, told from its headers before a tensor is read, and whether that fits this machine, or its GPU.

2.5 GB on disk (4-bit), 7.5 GiB in memory as bfloat16, + 0.3 GiB KV for one 2,048-token request; available 5.9 GiB
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch

from pagedllm.config import EngineConfig
from pagedllm.errors import NotEnoughMemoryError
from pagedllm.kv_groups import KVGroups
from pagedllm.model.checkpoint import Checkpoint, Stored
from pagedllm.model.decoder import weight_bytes
from pagedllm.model.hub import locate
from pagedllm.model.layer_groups import group_layers
from pagedllm.model.loader import check_head_dim, open_checkpoint
from pagedllm.model.registry import read_model_config
from pagedllm.runtime.compute_device import Gpu, load_kernels_of, open_device, wants_cuda
from pagedllm.runtime.device import read_memory_limits
from pagedllm.runtime.kv_cache import bytes_per_block
from pagedllm.runtime.resolve import CPU_MAX_NUM_BATCHED_TOKENS, GPU_MAX_NUM_BATCHED_TOKENS, binary_size, resolve_dtype
from pagedllm.runtime.startup import choose_formats, is_run_by_transformers

REQUEST_TOKENS = 2048  # of the one request that must fit beside the weights
GB = 10**9  # as disks are sold

logger = logging.getLogger("pagedllm")


@dataclass(frozen=True, slots=True)
class Footprint:
    stored: Stored
    weight_bytes: int
    dtype: str
    kv_bytes: int  # of one request of num_tokens
    num_tokens: int  # 0: not known yet
    available: int

    @property
    def fits(self) -> bool:
        return self.weight_bytes + self.kv_bytes <= self.available

    def __str__(self) -> str:
        kv = f", + {binary_size(self.kv_bytes)} KV for one {self.num_tokens:,}-token request" if self.num_tokens else ""
        stored = self.stored.num_bytes
        on_disk = f"{stored / GB:.1f} GB" if stored >= GB // 10 else f"{stored / 10**6:.1f} MB"
        return (
            f"{on_disk} on disk ({self.stored.kind}), {binary_size(self.weight_bytes)} in memory as {self.dtype}{kv}; "
            f"available {binary_size(self.available)}: {'fits' if self.fits else 'does not fit'}"
        )


def measure(config: EngineConfig, dtype: torch.dtype, checkpoint: Checkpoint, stored: Stored) -> Footprint:
    """Raises ModelError where config.json is not understood, or the kernels do not have its heads' size;
    NotSupportedError and LibraryError where the device or its kernels cannot be used."""
    device = open_device(config.device)
    if is_run_by_transformers(config.model_impl, checkpoint.config):
        from pagedllm.model.transformers_model import estimate_memory

        num_weight_bytes, bytes_per_token, max_position = estimate_memory(checkpoint, dtype)
        longest = min(max_position, config.max_model_len or max_position, REQUEST_TOKENS)
        kv_bytes = longest * bytes_per_token
    else:
        model = read_model_config(checkpoint.config, checkpoint.path)
        max_model_len = min(model.max_position, config.max_model_len or model.max_position)
        model, longest = group_layers(model, max_model_len), min(max_model_len, REQUEST_TOKENS)
        backend, weight_format = choose_formats(load_kernels_of(device, config.kernels), dtype)
        check_head_dim(model, backend, checkpoint)
        default_step = GPU_MAX_NUM_BATCHED_TOKENS if device.is_gpu else CPU_MAX_NUM_BATCHED_TOKENS
        num_new_tokens = config.max_num_batched_tokens or default_step
        groups = KVGroups(config.block_size, model.kv_windows, num_new_tokens)
        num_weight_bytes = weight_bytes(model, weight_format)
        kv_bytes = groups.num_blocks(longest) * bytes_per_block(model, backend, config.block_size, dtype)
    return Footprint(
        stored=stored,
        weight_bytes=num_weight_bytes,
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes=kv_bytes,
        num_tokens=longest,
        available=device.memory().free if isinstance(device, Gpu) else read_memory_limits().free,
    )


def look_at(config: EngineConfig) -> tuple[Checkpoint, Footprint]:
    """Reads the headers of a model only: nothing is converted. Raises as loading it would."""
    found: list[tuple[Checkpoint, Footprint]] = []

    def stop(checkpoint: Checkpoint, stored: Stored) -> None:
        found.append((checkpoint, measure(config, dtype, checkpoint, stored)))
        raise _EnoughError

    dtype = resolve_dtype(config.dtype, config.kernels, wants_cuda(config.device))
    with contextlib.suppress(_EnoughError):
        open_checkpoint(locate(config).model, config.load_format, config.gguf_file, dtype, check=stop)
    return found[0]


class _EnoughError(Exception):
    """The headers have been seen."""


def check_footprint(config: EngineConfig, dtype: torch.dtype, checkpoint: Checkpoint, stored: Stored) -> None:
    """Tells it, and raises NotEnoughMemoryError where the model does not fit."""
    footprint = measure(config, dtype, checkpoint, stored)
    if not footprint.fits:
        raise NotEnoughMemoryError(f"{config.model}: {footprint}")
    logger.info("%s: %s", config.model, footprint)
