"""Rotation, q/k norm and the KV write for CUDA, run by the emulator, against the twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.kv_layout import PlainLayout
from pagedllm.ops.kv_write import rope_norm_write_kv, rope_norm_write_kv_with
from tests.simt.attention_case import relative_error
from tests.simt.emulator import Emulator

SIMT = "pagedllm_simt"


def run_both(
    head_dim: int,
    rotary_dim: int | None,
    dtype: torch.dtype = torch.bfloat16,
    has_norm: bool = False,
    is_interleaved: bool = False,
    block_size: int = 16,
    num_q_heads: int = 3,
    num_kv_heads: int = 2,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(ours, the twin's) for qkv, K and V. The twin runs in float64 by way of float32 inputs of the same bits."""
    generator = torch.Generator().manual_seed(head_dim + (rotary_dim or 0))
    num_tokens = 5
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    k_cache, v_cache = (
        torch.randn(4, num_kv_heads, block_size, head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    slots = torch.tensor([block_size - 1, -1, 3 * block_size, 2 * block_size + 5, 0])
    table = rows = q_norm = k_norm = None
    if rotary_dim is not None:
        angles = torch.rand(9, rotary_dim // 2, generator=generator) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1)
        rows = torch.tensor([3, 8, 0, 7, 1], dtype=torch.int32)
    if has_norm:
        q_norm, k_norm = (torch.rand(head_dim, generator=generator) + 0.5 for _ in range(2))
    twins = [x.clone() for x in (qkv, k_cache, v_cache)]
    tail = (slots, table, rows, q_norm, k_norm, 1e-6, num_q_heads, num_kv_heads, is_interleaved)
    rope_norm_write_kv_with(PlainLayout(), *twins, *tail)
    rope_norm_write_kv(SIMT, qkv, k_cache, v_cache, *tail)
    return dict(zip(("qkv", "k", "v"), zip((qkv, k_cache, v_cache), twins, strict=True), strict=True))


def assert_one_rounding_apart(ours: Tensor, twins: Tensor) -> None:
    """Both round a float32 result once; sums in another order may turn a rounding, rarely."""
    differing = (ours != twins).double().mean()
    assert differing < 0.01
    assert relative_error(ours, twins.double()) < 1e-3


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norm", [False, True])
def test_q_k_and_v_are_as_the_twin_has_them(
    emulator: Emulator, head_dim: int, dtype: torch.dtype, has_norm: bool
) -> None:
    result = run_both(head_dim, head_dim, dtype, has_norm)
    assert_one_rounding_apart(*result["qkv"])
    assert_one_rounding_apart(*result["k"])
    assert torch.equal(*result["v"])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 20), (128, 64), (64, 32), (256, 64)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_partial_rotation_leaves_the_other_features(
    emulator: Emulator, head_dim: int, rotary_dim: int, is_interleaved: bool
) -> None:
    result = run_both(head_dim, rotary_dim, is_interleaved=is_interleaved, block_size=8)
    for ours, twins in (result["qkv"], result["k"]):
        assert_one_rounding_apart(ours, twins)
    assert torch.equal(*result["v"])


def test_a_layer_without_rotation_only_writes(emulator: Emulator) -> None:
    for ours, twins in run_both(128, None).values():
        assert torch.equal(ours, twins)


def test_a_padded_token_writes_no_slot(emulator: Emulator) -> None:
    """Token 1 has slot -1: the twin leaves the caches there, and the checker would report another block's bytes."""
    result = run_both(64, 64)
    assert torch.equal(*result["v"])
    assert emulator.traffic()["v_cache"].bytes_written == 4 * 2 * 64 * 2  # tokens, heads, features, bytes


def test_every_byte_is_moved_once_in_whole_sectors(emulator: Emulator) -> None:
    emulator.profile_begin()
    run_both(128, 128, has_norm=True)
    lines = [line for line in emulator.profile_end() if line.kind == "global_store"]
    assert lines
    assert all(line.units == line.ideal for line in lines)
    assert emulator.traffic()["qkv"].bytes_read == 5 * (3 + 2 * 2) * 128 * 2
    assert emulator.traffic()["k_cache"].bytes_read == 0


def test_what_the_kernel_cannot_do_is_refused_by_name(emulator: Emulator) -> None:
    with pytest.raises(RuntimeError, match="rope_table must have a rotary_dim that is a multiple of 4"):
        run_both(64, 6)
    with pytest.raises(RuntimeError, match="k_cache must have a head_dim of 64, 80, 96, 112, 128 or 256"):
        run_both(72, None)
    with pytest.raises(RuntimeError, match="k_cache must be bfloat16 or float16, got float32"):
        run_both(64, 64, torch.float32)
