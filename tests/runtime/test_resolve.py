"""What the user asked for becomes numbers, or an error that names field, value and what would work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedllm.config import EngineConfig
from pagedllm.errors import NotSupportedError
from pagedllm.kv_groups import KVGroups
from pagedllm.runtime.resolve import (
    GIB,
    PoolSize,
    resolve_device,
    resolve_dtype,
    resolve_max_num_batched_tokens,
    resolve_pool,
)

BLOCK_BYTES = 1 << 20


def pool(free_bytes: int = GIB, max_position: int = 2048, windows: tuple[int, ...] = (0,), **fields: Any) -> PoolSize:
    config = EngineConfig(model="m", **fields)
    groups = KVGroups(config.block_size, windows, 512)
    return resolve_pool(config, groups, max_position=max_position, bytes_per_block=BLOCK_BYTES, free_bytes=free_bytes)


def test_the_pool_takes_its_share_of_what_is_free() -> None:
    assert pool(gpu_memory_utilization=0.5).num_blocks == 512
    assert pool(kv_cache_memory_bytes=300 * BLOCK_BYTES).num_blocks == 300


def test_the_pool_is_never_larger_than_its_requests_could_fill() -> None:
    assert pool(max_num_seqs=2, max_model_len=100).num_blocks == 2 * 7


def test_a_length_from_the_config_is_lowered_with_a_notice() -> None:
    size = pool(max_position=1_000_000)
    assert size.max_model_len == size.num_blocks * 16 == 921 * 16
    assert size.notice is not None
    assert "1,000,000 to 14,736" in size.notice


def test_a_users_length_that_does_not_fit_is_an_error_with_the_largest_that_does() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=20,000 does not fit.*largest that fits is 14,736"):
        pool(max_position=1_000_000, max_model_len=20_000)


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at most 2,048.*got 4,096"):
        pool(max_model_len=4096)


def test_no_room_for_a_single_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no block of 1,048,576 bytes"):
        pool(free_bytes=BLOCK_BYTES)


def test_a_slow_model_gets_smaller_steps_and_a_users_own_number_stands() -> None:
    config = EngineConfig(model="m")
    assert resolve_max_num_batched_tokens(config, 0.3) == 512
    assert resolve_max_num_batched_tokens(config, 2.0) == 256
    assert resolve_max_num_batched_tokens(config, 60.0) == 128
    assert resolve_max_num_batched_tokens(EngineConfig(model="m", max_num_batched_tokens=9), 60.0) == 9


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", torch.bfloat16), ("bf16", torch.bfloat16), (torch.float32, torch.float32), ("float32", torch.float32)],
)
def test_dtypes_by_name_and_by_object(given: object, expected: torch.dtype) -> None:
    assert resolve_dtype(given) is expected


@pytest.mark.parametrize("given", ["half", "fp16", torch.float16])
def test_half_is_refused_with_the_way_out(given: object) -> None:
    with pytest.raises(NotSupportedError, match="pass dtype='bfloat16' or 'float32'"):
        resolve_dtype(given)


def test_the_emulated_cuda_kernels_take_half_and_no_float32() -> None:
    assert resolve_dtype("half", "simt") is torch.float16
    assert resolve_dtype("auto", "simt") is torch.bfloat16
    with pytest.raises(NotSupportedError, match=r"dtype='float' is not.*by kernels='simt': pass .*'float16'"):
        resolve_dtype("float", "simt")


@pytest.mark.parametrize("given", ["int8", 3, torch.int32])
def test_other_dtypes_are_refused_by_name(given: object) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of.*got"):
        resolve_dtype(given)


def test_devices() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(NotSupportedError, match="device='cuda:1'"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="got 'tpu'"):
        resolve_device("tpu")
