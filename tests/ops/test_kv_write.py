"""rope_norm_write_kv and copy_blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedllm.ops.kv_layout import CpuLayout
from pagedllm.ops.kv_write import copy_blocks, rope_norm_write_kv, rotate
from pagedllm.ops.library import load_kernels
from tests.ops.test_linear import randn, rms

NAMESPACE = load_kernels().namespace
DTYPES = (torch.bfloat16, torch.float32)
NUM_BLOCKS, EPS = 6, 1e-6


def make_caches(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A layer's cache, every slot NaN."""
    k_shape, v_shape = CpuLayout().shapes(NUM_BLOCKS, block_size, num_kv_heads, head_dim, dtype)
    return torch.full(k_shape, torch.nan, dtype=dtype), torch.full(v_shape, torch.nan, dtype=dtype)


def read_all(caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """K and V of all slots in order, [NUM_BLOCKS * block_size, num_kv_heads, head_dim]."""
    return CpuLayout().read_blocks(*caches, torch.arange(NUM_BLOCKS))


def make_rope(rotary_dim: int) -> Tensor:
    """A table of 50 positions: cosines, then sines."""
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(9, 3, 64, 64, 16), (4, 1, 80, 80, 8), (2, 2, 256, 128, 128), (5, 1, 32, 6, 32), (2, 1, 112, 0, 64)],
)
def test_error_is_at_most_twice_torchs_own(
    dtype: torch.dtype,
    is_interleaved: bool,
    has_norm: bool,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    """Also: v is copied bit by bit; slots not named and the rest of a wider row keep their NaN. rotary_dim 0: none."""
    num_tokens, num_columns = 7, (num_q_heads + 2 * num_kv_heads) * head_dim
    buffer = torch.full((num_tokens, num_columns + 8), torch.nan, dtype=dtype)
    buffer[:, :num_columns] = randn(num_tokens, num_columns, dtype=dtype)
    before = buffer.clone()
    q, k, v = (
        before[:, :num_columns]
        .unflatten(1, (-1, head_dim))
        .tensor_split((num_q_heads, num_q_heads + num_kv_heads), dim=1)
    )
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[3] = -1  # a padded token
    q_norm, k_norm = (randn(head_dim, seed=2), randn(head_dim, seed=3)) if has_norm else (None, None)
    table = make_rope(rotary_dim) if rotary_dim else None
    rows = torch.tensor([0, 49, 3, 3, 7, 20, 11], dtype=torch.int32) if rotary_dim else None
    caches = make_caches(block_size, num_kv_heads, head_dim, dtype)
    heads = (num_q_heads, num_kv_heads, is_interleaved)
    rope_norm_write_kv(NAMESPACE, buffer[:, :num_columns], *caches, slots, table, rows, q_norm, k_norm, EPS, *heads)

    def expected(x: Tensor, weight: Tensor | None, of: torch.dtype) -> Tensor:
        wide = x.to(of)
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.to(of)
        return wide if table is None else turn(wide, table[rows.long()].to(of), is_interleaved)

    written_q = buffer[:, : num_q_heads * head_dim].unflatten(1, (-1, head_dim))
    all_k, all_v = read_all(caches)
    is_real = slots >= 0
    for ours, x, weight in ((written_q, q, q_norm), (all_k[slots[is_real]], k[is_real], k_norm)):
        rows = rows if len(x) == num_tokens or rows is None else rows[is_real]
        exact, torchs = expected(x, weight, torch.float64), expected(x, weight, torch.float32).to(dtype)
        assert rms(ours - exact) <= 2 * rms(torchs - exact)
    assert torch.equal(all_v[slots[is_real]], v[is_real])
    others = torch.ones(NUM_BLOCKS * block_size, dtype=torch.bool)
    others[slots[is_real]] = False
    assert all_k[others].isnan().all()
    assert all_v[others].isnan().all()
    assert torch.equal(
        buffer[:, num_q_heads * head_dim :].nan_to_num(7), before[:, num_q_heads * head_dim :].nan_to_num(7)
    )


def turn(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotation as multiplication by a complex number, in x's precision."""
    half = cos_sin.shape[1] // 2
    factor = torch.complex(cos_sin[:, None, :half].contiguous(), cos_sin[:, None, half:].contiguous())
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (-1, 2)) if is_interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    product = product if is_interleaved else product.transpose(-1, -2)
    return torch.cat((product.flatten(-2), rest), -1)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_the_twins_rotation_is_a_complex_product(is_interleaved: bool) -> None:
    x, cos_sin = randn(4, 2, 16), make_rope(12)[:4]
    torch.testing.assert_close(rotate(x, cos_sin, is_interleaved), turn(x, cos_sin, is_interleaved))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_a_large_batch_are_written_as_alone(dtype: torch.dtype) -> None:
    """Threads that share a word of V (two tokens of a pair) do not disturb each other."""
    num_tokens, block_size = NUM_BLOCKS * 128, 128
    qkv = randn(num_tokens, 4 * 64, dtype=dtype)
    slots, table = torch.arange(num_tokens), make_rope(64)
    rows = (torch.arange(num_tokens) % 50).int()
    together, alone = (make_caches(block_size, 1, 64, dtype) for _ in range(2))
    batch, single = qkv.clone(), qkv.clone()
    rope_norm_write_kv(NAMESPACE, batch, *together, slots, table, rows, None, None, EPS, 2, 1, False)
    for i in range(num_tokens):
        one = slice(i, i + 1)
        rope_norm_write_kv(NAMESPACE, single[one], *alone, slots[one], table, rows[one], None, None, EPS, 2, 1, False)
    assert torch.equal(batch, single)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_copies_k_and_v(dtype: torch.dtype) -> None:
    caches = make_caches(8, 2, 32, dtype)
    for cache, seed in zip(caches, (1, 2), strict=True):
        cache.copy_(randn(*cache.shape, dtype=dtype, seed=seed))
    before = [cache.clone() for cache in caches]
    copy_blocks(NAMESPACE, *caches, torch.tensor([[0, 4], [2, 5]], dtype=torch.int32))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 2, 3, 0, 2]])
    copy_blocks(NAMESPACE, *caches, torch.empty(0, 2, dtype=torch.int32))


def test_opcheck() -> None:
    qkv, slots, rows = randn(2, 4 * 16), torch.tensor([3, 9]), torch.tensor([0, 1], dtype=torch.int32)
    caches = [cache.zero_() for cache in make_caches(8, 1, 16, torch.float32)]
    arguments = (qkv, *caches, slots, make_rope(16), rows, randn(16), randn(16), EPS, 2, 1, False)
    torch.library.opcheck(torch.ops.pagedllm.rope_norm_write_kv.default, arguments)
    torch.library.opcheck(torch.ops.pagedllm.copy_blocks.default, (*caches, torch.tensor([[0, 1]], dtype=torch.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(2, 63)}, r"qkv must have columns for 2 \+ 2 \* 1 heads"),
        ({"slot_mapping": torch.tensor([0, 48])}, "slot_mapping must hold values from -1 to 47, holds 48 at 1"),
        ({"slot_mapping": torch.tensor([0, 1], dtype=torch.int32)}, "slot_mapping must be int64, got int32"),
        ({"rope_rows": torch.tensor([0, 50], dtype=torch.int32)}, "rope_rows must hold values from 0 to 49"),
        ({"rope_rows": None}, "rope_table and rope_rows must be given together"),
        ({"rope_table": torch.zeros(50, 18)}, "rope_table must have an even number of columns, at most head_dim 16"),
        ({"q_norm": torch.zeros(15)}, r"q_norm must have shape \[16\]"),
        ({"k_cache": torch.zeros(6, 1, 8, 8, 2).bfloat16()}, "k_cache must be float32, got bfloat16"),
        ({"v_cache": torch.zeros(6, 1, 16, 8)}, r"v_cache must have shape \[6, 1, 8, 16\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    k_cache, v_cache = make_caches(8, 1, 16, torch.float32)
    arguments = {
        "qkv": torch.zeros(2, 64),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.tensor([0, 1]),
        "rope_table": make_rope(16),
        "rope_rows": torch.tensor([0, 1], dtype=torch.int32),
        "q_norm": None,
        "k_norm": None,
    } | change
    with pytest.raises(RuntimeError, match="rope_norm_write_kv: " + message):
        rope_norm_write_kv(NAMESPACE, **arguments, eps=EPS, num_q_heads=2, num_kv_heads=1, is_interleaved=False)  # type: ignore[arg-type]


def test_copy_blocks_refuses_blocks_that_do_not_exist() -> None:
    with pytest.raises(RuntimeError, match="copy_blocks: pairs must hold values from 0 to 5, holds 6 at 1"):
        copy_blocks(NAMESPACE, *make_caches(8, 1, 16, torch.float32), torch.tensor([[0, 6]], dtype=torch.int32))
