"""The PTX that nvcc emits gives what the emulator gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagedllm.ops.kv_write import copy_blocks, rope_norm_write_kv
from pagedllm.ops.linear import Activation, gated_activation, gather_rows
from pagedllm.ops.moe import grouped_dense
from pagedllm.ops.norm import add_rms_norm
from pagedllm.ops.sampling import process_logits, sample, top_logprobs
from tests.simt.attention_case import AttentionCase, make_batch, random_case, relative_error
from tests.simt.emulator import Emulator
from tests.simt.nvcc import NO_NVCC, compile_source, find_tool
from tests.simt.ptx_interpreter import run_launch
from tests.simt.ptx_parser import Kernel, parse_ptx
from tests.simt.test_grouped_dense import make_product

pytestmark = pytest.mark.skipif(find_tool("nvcc") is None, reason=NO_NVCC)
SIMT = "pagedllm_simt"


@pytest.fixture(scope="module")
def kernels_of() -> Callable[[str], dict[str, Kernel]]:
    parsed: dict[str, dict[str, Kernel]] = {}

    def get(source: str) -> dict[str, Kernel]:
        if source not in parsed:
            parsed[source] = parse_ptx(compile_source(source, "80", "ptx").path.read_text())
        return parsed[source]

    return get


def run_by_ptx(emulator: Emulator, kernels: dict[str, Kernel], call: Callable[[], object]) -> int:
    """Runs an operator's launches through the interpreter instead of the emulator; returns their number."""
    emulator.capture_begin()
    try:
        call()
    finally:
        launches = emulator.capture_end()
    for launch in launches:
        run_launch(kernels[launch.symbol], launch, emulator.traffic())
    return len(launches)


def compare(emulator: Emulator, kernels: dict[str, Kernel], call: Callable[..., object], *outputs: Tensor) -> None:
    """Of both runs the outputs are equal, but for the last bit of approximate instructions."""
    before = [output.clone() for output in outputs]
    call()
    by_emulator = [output.clone() for output in outputs]
    for output, original in zip(outputs, before, strict=True):
        output.copy_(original)
    assert run_by_ptx(emulator, kernels, call) > 0
    for output, original, expected in zip(outputs, before, by_emulator, strict=True):
        assert not torch.equal(output, original)
        if output.dtype == torch.int32:
            assert torch.equal(output, expected)
        else:
            torch.testing.assert_close(
                output, expected, rtol=1.6e-2 if output.dtype == torch.bfloat16 else 2e-3, atol=1e-5, equal_nan=True
            )


KernelsOf = Callable[[str], dict[str, Kernel]]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_items_of_every_height(
    emulator: Emulator, kernels_of: KernelsOf, head_dim: int, dtype: torch.dtype
) -> None:
    case = AttentionCase((65, 20, 1), (65, 40, 520), head_dim=head_dim, dtype=dtype, num_q_heads=2, num_kv_heads=1)
    batch = make_batch(case)
    num_launches = run_by_ptx(emulator, kernels_of(f"attention_d{head_dim}"), batch.attend)
    assert num_launches == (4 if head_dim <= 128 else 3)
    by_ptx = batch.out.clone()
    assert relative_error(by_ptx, batch.expected()) < 5e-3
    assert relative_error(by_ptx, batch.attend().double()) < 1e-3


@pytest.mark.parametrize("seed", range(100, 106))
def test_attention_of_random_batches(emulator: Emulator, kernels_of: KernelsOf, seed: int) -> None:
    batch = make_batch(random_case(seed))
    run_by_ptx(emulator, kernels_of(f"attention_d{batch.case.head_dim}"), batch.attend)
    assert relative_error(batch.out, batch.expected()) < 5e-3


def test_a_carried_prompt(emulator: Emulator, kernels_of: KernelsOf) -> None:
    batch = make_batch(
        AttentionCase((140,), (1050,), num_q_heads=1, num_kv_heads=1, softcap=20.0, window=600, has_sinks=True)
    )
    assert batch.metadata.work[0][1:, 7].tolist() == [1, 0] or batch.metadata.work[0][1:, 7].sum() > 0
    run_by_ptx(emulator, kernels_of("attention_d64"), batch.attend)
    assert relative_error(batch.out, batch.expected()) < 5e-3


@pytest.mark.parametrize("window", [0, 100])
def test_a_prefix_attended_once(emulator: Emulator, kernels_of: KernelsOf, window: int) -> None:
    """An item of three sequences' rows over 128 keys, whose own items go on from what it left."""
    prefixes = ((0, 0), (0, 128), (0, 128))
    case = AttentionCase((1, 1, 1), (150, 140, 131), 2, 1, window=window, prefixes=prefixes, is_shared=True)
    batch = make_batch(case)
    assert sorted(batch.metadata.work[0][1:, 7].tolist()) == [3, 3, 3, 4]
    run_by_ptx(emulator, kernels_of("attention_d64"), batch.attend)
    by_ptx = batch.out.clone()
    assert relative_error(by_ptx, batch.expected()) < 5e-3
    assert relative_error(by_ptx, batch.attend().double()) < 1e-3


@pytest.mark.parametrize("counts", [[3, 0, 1], [20, 7]])  # tiles of 16 rows, and of 64
def test_products_of_experts(emulator: Emulator, kernels_of: KernelsOf, counts: list[int]) -> None:
    arguments = make_product(counts, 72, 40, torch.bfloat16, Activation.SILU, True)
    out = arguments[0]
    compare(emulator, kernels_of("experts"), lambda: grouped_dense(SIMT, *arguments, Activation.SILU), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms(emulator: Emulator, kernels_of: KernelsOf, dtype: torch.dtype) -> None:
    x, residual, out = torch.randn(2, 576).to(dtype), torch.randn(2, 576).to(dtype), torch.zeros(2, 576, dtype=dtype)
    weight = torch.rand(576)
    compare(emulator, kernels_of("norm"), lambda: add_rms_norm(SIMT, out, residual, x, weight, 1e-5), out, residual)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU])
def test_activations(emulator: Emulator, kernels_of: KernelsOf, activation: Activation) -> None:
    gate, up, out = torch.randn(2, 64).bfloat16() * 3, torch.randn(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
    compare(emulator, kernels_of("rows"), lambda: gated_activation(SIMT, out, gate, up, activation), out)


def test_moved_rows_and_blocks(emulator: Emulator, kernels_of: KernelsOf) -> None:
    x, out = torch.randn(5, 64), torch.zeros(2, 64)
    indices = torch.tensor([4, 1], dtype=torch.int32)
    compare(emulator, kernels_of("rows"), lambda: gather_rows(SIMT, out, x, indices), out)
    k_cache, v_cache = (torch.randn(3, 2, 8, 64).half() for _ in range(2))
    pairs = torch.tensor([[0, 2]], dtype=torch.int32)
    compare(emulator, kernels_of("rows"), lambda: copy_blocks(SIMT, k_cache, v_cache, pairs), k_cache, v_cache)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_kv_write(emulator: Emulator, kernels_of: KernelsOf, head_dim: int, is_interleaved: bool) -> None:
    qkv = torch.randn(3, 4 * head_dim).bfloat16()
    k_cache, v_cache = (torch.zeros(2, 1, 16, head_dim).bfloat16() for _ in range(2))
    slots = torch.tensor([3, -1, 20])
    table, rows = torch.randn(4, head_dim // 2), torch.tensor([1, 0, 3], dtype=torch.int32)
    norm = torch.rand(head_dim)
    call = lambda: rope_norm_write_kv(  # noqa: E731
        SIMT, qkv, k_cache, v_cache, slots, table, rows, norm, norm, 1e-6, 2, 1, is_interleaved
    )
    compare(emulator, kernels_of("kv_write"), call, qkv, k_cache, v_cache)


def test_sampling(emulator: Emulator, kernels_of: KernelsOf) -> None:
    logits = (torch.randn(3, 1500, generator=torch.Generator().manual_seed(1)) * 30).round() / 10
    token_ids = torch.full((3,), -9, dtype=torch.int32)
    arguments = (
        torch.tensor([1.0, 0.7, 0.0]), torch.tensor([0, 30, 0], dtype=torch.int32), torch.tensor([0.9, 0.8, 1.0]),
        torch.tensor([0.0, 0.01, 0.0]), torch.tensor([5, -3, 9]),
        torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32),
    )  # fmt: skip
    compare(emulator, kernels_of("sample"), lambda: sample(SIMT, token_ids, logits, *arguments), token_ids)
    twins = torch.empty_like(token_ids)
    sample.reference(twins, logits, *arguments)
    assert torch.equal(token_ids, twins)


def test_edits_of_logits(emulator: Emulator, kernels_of: KernelsOf) -> None:
    logits = torch.randn(2, 700)
    bitmask = torch.full((2, 22), 0x5A5A5A5A, dtype=torch.int32)
    offsets, ids = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([5, 5, 699], dtype=torch.int32)
    counts = torch.tensor([0, 2, 1], dtype=torch.int32)
    penalty_ids = torch.tensor([1, 3, 4], dtype=torch.int32)
    values, penalties = torch.tensor([0.5, -2.0, 1.0]), torch.tensor([[1.5, 0.5, 0.25]] * 2)
    arguments = (bitmask, offsets, ids, values, penalties, offsets, penalty_ids, counts)
    compare(emulator, kernels_of("process_logits"), lambda: process_logits(SIMT, logits, *arguments), logits)


@pytest.mark.parametrize("k", [3, 300])
def test_logprobs(emulator: Emulator, kernels_of: KernelsOf, k: int) -> None:
    logits = torch.randn(2, 300)
    ids, values = torch.zeros(2, k, dtype=torch.int32), torch.zeros(2, k)
    token_values, ranks = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([7, -1], dtype=torch.int32)
    call = lambda: top_logprobs(SIMT, ids, values, token_values, ranks, logits, tokens)  # noqa: E731
    compare(emulator, kernels_of("top_logprobs"), call, ids, values, token_values, ranks)
