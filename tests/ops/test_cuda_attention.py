"""The work list of the CUDA backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagedllm.ops.attention import AttentionPlan, AttentionShape
from pagedllm.ops.cuda_attention import MAX_LONG_SLOTS, CudaAttentionBackend

SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64)  # two rows a token
FLOATS_PER_SLOT = 2 * 16 * (64 + 2)


def plan(
    q_lens: list[int], seq_lens: list[int], shape: AttentionShape = SHAPE, deterministic: bool = True
) -> AttentionPlan:
    backend = CudaAttentionBackend("pagedllm_simt", deterministic)
    return backend.plan(np.array(q_lens, np.int32), np.array(seq_lens, np.int32), shape)


def test_decodes_are_items_of_16_rows_without_slots() -> None:
    result = plan([1, 1], [40, 512])
    assert result.work.tolist() == [[2, 0, 0, 2, 0, 0, 0, 0], [1, 0, 2, 0, 512, -1, 1, 0], [0, 0, 2, 0, 40, -1, 1, 0]]
    assert result.merge.tolist() == [[0, 0, 0, 0]]
    assert result.workspace_size == 0


def test_a_long_decode_is_split_in_parallel_and_merged() -> None:
    result = plan([1], [1025])
    assert result.work.tolist() == [
        [3, 0, 0, 3, 0, 0, 0, 0],
        [0, 0, 2, 0, 512, 0, 3, 0],
        [0, 0, 2, 512, 1024, 1, 3, 0],
        [0, 0, 2, 1024, 1025, 2, 3, 0],
    ]
    assert result.merge.tolist() == [[1, 0, 0, 0], [0, 0, 0, 3]]
    assert result.workspace_size == 3 * FLOATS_PER_SLOT


def test_a_prompt_is_cut_into_full_items_and_the_smallest_that_holds_the_rest() -> None:
    result = plan([100], [100])  # 200 rows = 128 + 72
    assert result.work[:, :5].tolist() == [[2, 2, 0, 0, 0], [0, 128, 72, 0, 100], [0, 0, 128, 0, 64]]
    assert plan([80], [80]).work[0, :4].tolist() == [2, 1, 1, 0]  # 160 = 128 + 32
    assert plan([70], [70]).work[0, :4].tolist() == [2, 1, 0, 1]  # 140 = 128 + 12


def test_head_dim_256_has_no_items_of_128_rows() -> None:
    assert plan([70], [70], AttentionShape(4, 2, 256)).work[0, :4].tolist() == [3, 0, 2, 1]


def test_a_long_prompt_is_carried_with_slots_for_its_rows() -> None:
    result = plan([100], [700])
    items = result.work[1:].tolist()
    assert items == [[0, 128, 72, 0, 700, 8, 1, 1], [0, 0, 128, 0, 664, 0, 1, 1]]
    assert result.merge[0, 0] == 0
    assert result.workspace_size == 16 * FLOATS_PER_SLOT


def test_without_determinism_a_long_prompt_needs_no_slots() -> None:
    result = plan([100], [700], deterministic=False)
    assert result.work[1:, 4:].tolist() == [[700, -1, 1, 0], [664, -1, 1, 0]]
    assert result.workspace_size == 0


def test_a_short_run_of_new_tokens_over_many_keys_is_split_in_parallel() -> None:
    result = plan([20], [1000])  # 40 rows: an item of 64, three slots of rows merged
    assert result.work[1:].tolist() == [[0, 0, 40, 0, 512, 0, 2, 0], [0, 0, 40, 512, 1000, 1, 2, 0]]
    assert result.merge[1:].tolist() == [[0, 0, 0, 2], [0, 16, 2, 2], [0, 32, 4, 2]]


def test_parallel_slots_of_long_items_are_bounded() -> None:
    result = plan([20] * 100, [2000] * 100)
    is_parallel = result.work[1:, 6] > 1
    assert len(np.unique(result.work[1:][is_parallel, 0])) == MAX_LONG_SLOTS // (4 * 4)
    assert result.work[1:, 7].sum() == 100 - MAX_LONG_SLOTS // (4 * 4)  # the others are carried


@pytest.mark.parametrize("seed", range(20))
def test_every_row_sees_every_key_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q_lens = rng.integers(0, 200, 6) if seed % 2 else rng.integers(0, 2, 6)
    seq_lens = q_lens + rng.integers(0, 1500, 6)
    shape = AttentionShape(6 * 2, 2, int(rng.choice((64, 256))))
    result = plan(q_lens.tolist(), seq_lens.tolist(), shape)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for seq, first_row, num_rows, first_key, end_key in result.work[1:, :5].tolist():
        for row in range(first_row, first_row + num_rows):
            seen.setdefault((seq, row), []).append((first_key, end_key))
    assert sorted(seen) == [(seq, row) for seq in range(6) for row in range(q_lens[seq] * 6)]
    for (seq, row), ranges in seen.items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert ranges[-1][1] > seq_lens[seq] - q_lens[seq] + row // 6


def test_slots_are_disjoint_and_inside_the_workspace() -> None:
    result = plan([1, 30, 100, 1], [3000, 900, 1200, 600])
    used: list[int] = []
    for _, _, num_rows, _, _, slot, stride, _ in result.work[1:].tolist():
        used += [slot + group * stride for group in range(-(-num_rows // 16)) if slot >= 0]
    assert len(used) == len(set(used))
    assert max(used) < result.workspace_size // FLOATS_PER_SLOT


def test_splits_that_a_window_hides_have_no_items() -> None:
    """The token sees keys 700 to 1299; the first row of a prompt 1000 to 1199, its last 1029 to 1228."""
    lengths = np.array([1300], np.int32)
    backend = CudaAttentionBackend("pagedllm_simt")
    decode = backend.plan(np.array([1], np.int32), lengths, AttentionShape(4, 2, 64), window=600)
    assert decode.work[1:, 3:7].tolist() == [[512, 1024, 1, 3], [1024, 1300, 2, 3]]
    assert decode.merge.tolist() == [[1, 0, 0, 0], [0, 0, 0, 3]]
    prompt = backend.plan(np.array([30], np.int32), lengths - 71, AttentionShape(4, 2, 64), window=200)
    assert sorted(prompt.work[1:, 3].tolist()) == [512, 1024]
