"""Paged attention for CUDA, run by the emulator in its checking build."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pagedllm.ops.attention import AttentionMetadata
from tests.simt.attention_case import AttentionCase, Batch, make_batch, make_metadata, random_case, relative_error
from tests.simt.emulator import BACKWARD, FORWARD, RANDOM, Emulator


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_batches_are_as_exact_as_torch_and_break_no_rule(emulator: Emulator, first: int) -> None:
    for seed in range(first, first + 25):
        case = random_case(seed)
        batch = make_batch(case)
        emulator.configure(order=seed % 3, seed=seed + 1)
        expected = batch.expected()
        own_error = relative_error(batch.by_torch(), expected)
        error = relative_error(batch.attend(), expected)
        assert error <= 2 * own_error or error <= 1e-4, f"{case}: {error:.2e}, torch {own_error:.2e}"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_head_dim_and_type_in_items_of_every_height(emulator: Emulator, head_dim: int, dtype: torch.dtype) -> None:
    case = AttentionCase((70, 30, 1), (75, 40, 600), head_dim=head_dim, dtype=dtype, num_q_heads=4, num_kv_heads=2)
    batch = make_batch(case)
    num_by_height = batch.metadata.work[0][0, 1:4].tolist()
    assert num_by_height == ([1, 1, 3] if head_dim <= 128 else [0, 3, 3])  # 128 + 12 rows, 60 rows, a decode in two
    assert relative_error(batch.attend(), batch.expected()) < 5e-3


# ---- exactness: a row's bits depend on its own keys only

SEQUENCES = AttentionCase((1, 40, 1, 200), (700, 40, 64, 1100), head_dim=64, num_q_heads=4, num_kv_heads=1)


def rebatch(batch: Batch, seqs: list[int], q_slices: list[slice], lengths: list[int]) -> Batch:
    """A batch over the same cache with some of the sequences, their tokens and their lengths cut."""
    case = batch.case
    begins = [sum(case.q_lens[:seq]) for seq in range(len(case.q_lens))]
    q = torch.cat([batch.q[begins[s] : begins[s] + case.q_lens[s]][cut] for s, cut in zip(seqs, q_slices, strict=True)])
    q_lens = tuple(len(range(case.q_lens[s])[cut]) for s, cut in zip(seqs, q_slices, strict=True))
    new_case = dataclasses.replace(case, q_lens=q_lens, seq_lens=tuple(lengths))
    metadata = make_metadata(new_case, batch.metadata.block_tables[0][seqs].contiguous())
    return Batch(new_case, q, batch.kv_cache, metadata, batch.sinks)


def split_by_sequence(out: Tensor, q_lens: tuple[int, ...]) -> list[Tensor]:
    return list(out.split(list(q_lens)))


def test_a_sequence_has_the_same_bits_alone_as_in_a_batch(emulator: Emulator) -> None:
    batch = make_batch(SEQUENCES)
    together = split_by_sequence(batch.attend(), SEQUENCES.q_lens)
    for seq, length in enumerate(SEQUENCES.seq_lens):
        alone = rebatch(batch, [seq], [slice(None)], [length]).attend()
        assert torch.equal(alone, together[seq]), f"sequence {seq}"


@pytest.mark.parametrize("chunk", [1, 31, 64, 130])
def test_a_prompt_has_the_same_bits_in_chunks(emulator: Emulator, chunk: int) -> None:
    """In chunks of 1 a row is a decode, in 16-row items and parallel splits; whole it is in carried 128-row items."""
    batch = make_batch(SEQUENCES)
    seq, num_new, length = 3, 200, 1100
    whole = split_by_sequence(batch.attend(), SEQUENCES.q_lens)[seq]
    for begin in range(0, num_new, chunk if chunk > 1 else 37):
        end = min(num_new, begin + chunk)
        part = rebatch(batch, [seq], [slice(begin, end)], [length - num_new + end]).attend()
        assert torch.equal(part, whole[begin:end]), f"tokens {begin} to {end}"


@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 300])
def test_the_block_size_does_not_change_a_bit(emulator: Emulator, block_size: int, window: int) -> None:
    outputs = []
    case = dataclasses.replace(SEQUENCES, window=window, has_sinks=True)
    batch = make_batch(case)
    outputs.append(batch.attend())
    num_blocks = [-(-length // block_size) for length in case.seq_lens]
    shape = (sum(num_blocks), case.num_kv_heads, block_size, case.head_dim)
    caches = tuple(torch.full(shape, torch.nan, dtype=case.dtype) for _ in range(2))
    block_table = torch.zeros(len(num_blocks), max(num_blocks), dtype=torch.int32)
    used = 0
    for seq, length in enumerate(case.seq_lens):
        block_table[seq, : num_blocks[seq]] = torch.arange(used, used + num_blocks[seq])
        for position in range(length):
            old_block = int(batch.metadata.block_tables[0][seq, position // case.block_size])
            for cache, old in zip(caches, batch.kv_cache, strict=True):
                cache[used + position // block_size, :, position % block_size] = old[
                    old_block, :, position % case.block_size
                ]
        used += num_blocks[seq]
    new_case = dataclasses.replace(case, block_size=block_size)
    other = Batch(new_case, batch.q, (caches[0], caches[1]), make_metadata(new_case, block_table), batch.sinks)
    assert torch.equal(other.attend(), batch.out)


def test_the_order_of_threads_does_not_change_a_bit(emulator: Emulator) -> None:
    batch = make_batch(SEQUENCES)
    results = []
    for order in (FORWARD, BACKWARD, RANDOM):
        emulator.configure(order, seed=order + 5)
        results.append(batch.attend().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---- bytes, banks, graphs


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(("q_lens", "seq_lens"), [((1, 1, 1), (130, 700, 64)), ((128,), (128,))])
def test_no_key_is_read_twice_and_no_bank_conflicts(
    emulator: Emulator, head_dim: int, q_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    case = AttentionCase(q_lens, seq_lens, head_dim=head_dim, num_q_heads=2, num_kv_heads=2)
    batch = make_batch(case)
    before = emulator.counters()
    emulator.profile_begin()
    batch.attend()
    lines = emulator.profile_end()
    after = emulator.counters()
    tile_passes = -(-sum(q_lens) // (128 if head_dim <= 128 else 64)) if len(q_lens) == 1 else 1
    keys_read = sum(seq_lens) if tile_passes == 1 else sum(64 * (tile + 1) for tile in range(tile_passes))
    minimum = keys_read * case.num_kv_heads * head_dim * 2
    traffic = emulator.traffic()
    if len(q_lens) > 1:  # decodes are split and merged, each key once
        assert traffic["k_cache"].bytes_read == minimum
    assert traffic["k_cache"].bytes_read <= 1.02 * minimum
    assert traffic["v_cache"].bytes_read <= 1.02 * minimum
    loads = after["load_matrix"] - before["load_matrix"]
    assert after["load_matrix_wavefronts"] - before["load_matrix_wavefronts"] == 4 * loads  # four matrices, one each
    conflicts = [line for line in lines if line.kind.startswith("shared") and line.units > line.ideal]
    assert conflicts == []


def test_a_window_reads_the_keys_of_the_window_only(emulator: Emulator) -> None:
    case = AttentionCase((1, 1), (700, 100), window=130)
    batch = make_batch(case)
    batch.attend()
    minimum = (130 + 100) * case.num_kv_heads * case.head_dim * 2
    assert emulator.traffic()["k_cache"].bytes_read == minimum
    assert emulator.traffic()["v_cache"].bytes_read == minimum


def test_blocks_that_a_window_has_left_behind_may_hold_anything(emulator: Emulator) -> None:
    for block_size, window in ((8, 24), (16, 24), (64, 100)):
        batch = make_batch(AttentionCase((1, 30), (300, 131), window=window, block_size=block_size))
        expected = batch.attend().clone()
        for seq, (num_new, length) in enumerate(zip(batch.case.q_lens, batch.case.seq_lens, strict=True)):
            num_left = max(0, length - num_new + 1 - window) // block_size
            for cache in batch.kv_cache:
                cache[batch.metadata.block_tables[0][seq, :num_left].long()] = torch.nan
        assert torch.equal(batch.attend(), expected)


def test_output_leaves_in_whole_sectors(emulator: Emulator) -> None:
    batch = make_batch(AttentionCase((70, 1), (70, 50), head_dim=128))
    emulator.profile_begin()
    batch.attend()
    stores = [line for line in emulator.profile_end() if line.kind == "global_store"]
    assert stores
    assert all(line.units == line.ideal for line in stores)


def test_a_captured_step_serves_other_batches_of_its_size(emulator: Emulator) -> None:
    """What a captured graph freezes are pointers and shapes; lengths, tables and lists are read on the device."""
    small = make_batch(AttentionCase((1, 1, 1), (17, 100, 3)))
    large = make_batch(AttentionCase((1, 1, 1), (250, 64, 700), seed=1))
    capacity = {
        "work": 12,
        "merge": 4,
        "workspace": max(small.metadata.workspace.numel(), large.metadata.workspace.numel()),
    }

    def padded(values: Tensor, rows: int) -> Tensor:
        return torch.cat((values, torch.full((rows - len(values), values.shape[1]), -7, dtype=torch.int32)))

    cache_shape = max((small, large), key=lambda batch: len(batch.kv_cache[0])).kv_cache[0].shape
    static = Batch(
        large.case,
        torch.zeros_like(large.q),
        (torch.zeros(cache_shape, dtype=large.case.dtype), torch.zeros(cache_shape, dtype=large.case.dtype)),
        AttentionMetadata(
            torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
            (torch.zeros(3, 44, dtype=torch.int32),),
            large.metadata.slot_mappings, (torch.zeros(capacity["work"], 8, dtype=torch.int32),),
            (torch.zeros(capacity["merge"], 4, dtype=torch.int32),), torch.zeros(capacity["workspace"]),
        ),
        None,
    )  # fmt: skip
    emulator.capture_begin()
    static.attend()
    assert len(emulator.capture_end()) == 2  # 16-row items, merge
    for batch in (small, large, small):
        m, s = batch.metadata, static.metadata
        static.q.copy_(batch.q)
        for cache, source in zip(static.kv_cache, batch.kv_cache, strict=True):
            cache[: len(source)] = source
        s.cu_seqlens_q.copy_(m.cu_seqlens_q)
        s.seq_lens.copy_(m.seq_lens)
        s.block_tables[0][:, : m.block_tables[0].shape[1]] = m.block_tables[0]
        s.work[0].copy_(padded(m.work[0], capacity["work"]))
        s.merge[0].copy_(padded(m.merge[0], capacity["merge"]))
        emulator.replay()
        assert relative_error(static.out, batch.expected()) < 5e-3


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "k_cache must have a head_dim of 64, 80, 96, 112, 128 or 256"),
        ({"dtype": torch.float32}, "k_cache must be bfloat16 or float16, got float32"),
        ({"block_size": 24}, "k_cache must have a block size of 8, 16, 32, 64 or 128 in dimension 2"),
        ({"num_q_heads": 5}, "q must have a multiple of the caches' KV heads"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(
    emulator: Emulator, change: dict[str, object], message: str
) -> None:
    case = AttentionCase((1,), (5,))
    batch = make_batch(dataclasses.replace(case, **change))
    before = emulator.counters()["launches"]
    with pytest.raises(RuntimeError, match=f"paged_attention: {message}"):
        batch.attend()
    assert emulator.counters()["launches"] == before
