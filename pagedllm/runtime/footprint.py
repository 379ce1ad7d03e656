"""What a model takes, told from its headers before a tensor is read, and whether that fits this machine.

2.5 GB on disk (4-bit), 7.5 GiB in memory as bfloat16, + 0.3 GiB KV for one 2,048-token request; available 5.9 GiB
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass

import torch

from pagedllm.config import EngineConfig
from pagedllm.errors import NotEnoughMemoryError
from pagedllm.model.checkpoint import Checkpoint, Stored
from pagedllm.model.decoder import weight_bytes
from pagedllm.model.hub import locate
from pagedllm.model.loader import open_checkpoint
from pagedllm.model.registry import has_family, read_model_config
from pagedllm.ops.library import load_kernels
from pagedllm.runtime.device import read_memory_limits
from pagedllm.runtime.kv_cache import bytes_per_block
from pagedllm.runtime.resolve import GIB, resolve_dtype
from pagedllm.runtime.startup import choose_formats

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
        kv = (
            f", + {self.kv_bytes / GIB:.1f} GiB KV for one {self.num_tokens:,}-token request" if self.num_tokens else ""
        )
        return (
            f"{self.stored.num_bytes / GB:.1f} GB on disk ({self.stored.kind}), "
            f"{self.weight_bytes / GIB:.1f} GiB in memory as {self.dtype}{kv}; "
            f"available {self.available / GIB:.1f} GiB: {'fits' if self.fits else 'does not fit'}"
        )


def measure(config: EngineConfig, dtype: torch.dtype, checkpoint: Checkpoint, stored: Stored) -> Footprint:
    """Raises ModelError where config.json is not understood."""
    if config.model_impl == "transformers" or (config.model_impl == "auto" and not has_family(checkpoint.config)):
        return _measure_foreign(dtype, checkpoint, stored)
    model = read_model_config(checkpoint.config, checkpoint.path)
    backend, weight_format = choose_formats(load_kernels(config.kernels), dtype)
    longest = min(model.max_position, config.max_model_len or model.max_position, REQUEST_TOKENS)
    num_blocks = -(-longest // config.block_size)
    return Footprint(
        stored=stored,
        weight_bytes=weight_bytes(model, weight_format),
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes=num_blocks * bytes_per_block(model, backend, config.block_size, dtype),
        num_tokens=longest,
        available=read_memory_limits().free,
    )


def _measure_foreign(dtype: torch.dtype, checkpoint: Checkpoint, stored: Stored) -> Footprint:
    """Of a model that transformers computes. What its cache takes is known when it has been loaded and run."""
    num_weights = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    return Footprint(
        stored=stored,
        weight_bytes=num_weights * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes=0,
        num_tokens=0,
        available=read_memory_limits().free,
    )


def look_at(config: EngineConfig) -> tuple[Checkpoint, Footprint]:
    """Reads the headers of a model only: nothing is converted. Raises as loading it would."""
    found: list[tuple[Checkpoint, Footprint]] = []

    def stop(checkpoint: Checkpoint, stored: Stored) -> None:
        found.append((checkpoint, measure(config, dtype, checkpoint, stored)))
        raise _EnoughError

    dtype = resolve_dtype(config.dtype, config.kernels)
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
