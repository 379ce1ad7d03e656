"""The runner's rows, and the numbers of a forward pass, from literals."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from pagedllm.engine.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.runtime import forward_batch
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.forward_batch import BatchBuilder, ForwardBatch, build_forward_batch
from pagedllm.sampling_params import SamplingParams


def filled_rows() -> RequestRows:
    rows = RequestRows(max_num_seqs=4, max_model_len=64, block_size=8, num_kv_groups=1)
    for name, tokens, blocks in (("a", range(100, 119), (7, 3, 5)), ("b", range(200, 205), (2,))):
        row = rows.acquire(name, num_prompt_tokens=len(tokens), rope_variant=0)
        rows.append_tokens(row, list(tokens))
        rows.append_blocks(row, (blocks,))
    return rows


def test_rows_are_reused_after_release_and_start_empty() -> None:
    rows = filled_rows()
    first = rows.row_of("a")
    assert rows.release("a") == first
    assert rows.acquire("c", num_prompt_tokens=1, rope_variant=2) == first
    assert rows.num_tokens[first] == 0
    assert rows.num_blocks[0, first] == 0
    assert rows.rope_variant[first] == 2


def test_releasing_a_request_that_never_ran_is_allowed() -> None:
    assert filled_rows().release("unknown") is None


def test_a_chunk_and_a_decode_share_a_batch() -> None:
    rows = filled_rows()
    plan = SchedulerOutput(
        scheduled=[
            ScheduledRequest("b", num_computed_tokens=4, num_new_tokens=1, first_logits_index=4),
            ScheduledRequest("a", num_computed_tokens=6, num_new_tokens=4, first_logits_index=18),
        ],
        num_tokens=5,
    )
    batch = build_forward_batch(plan, rows, block_size=8)
    assert batch.q_lens.tolist() == [1, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5]
    assert batch.seq_lens.tolist() == [5, 10]
    assert batch.token_ids.tolist() == [204, 106, 107, 108, 109]
    assert batch.positions.tolist() == [4, 6, 7, 8, 9]
    assert batch.slot_mappings[0].tolist() == [2 * 8 + 4, 7 * 8 + 6, 7 * 8 + 7, 3 * 8 + 0, 3 * 8 + 1]
    assert batch.block_tables[0].tolist() == [[2, 0, 0], [7, 3, 5]]
    assert batch.logits_indices.tolist() == [0]
    assert batch.logits_sequences.tolist() == [0]


def test_from_the_first_index_on_tokens_are_scored_and_the_last_is_sampled_from() -> None:
    rows = filled_rows()
    plan = SchedulerOutput(
        scheduled=[
            ScheduledRequest("a", num_computed_tokens=16, num_new_tokens=3, first_logits_index=18),
            ScheduledRequest("b", num_computed_tokens=0, num_new_tokens=5, first_logits_index=2),
        ],
        num_tokens=8,
    )
    batch = build_forward_batch(plan, rows, block_size=8)
    assert batch.logits_indices.tolist() == [2, 7]
    assert batch.logits_sequences.tolist() == [0, 1]
    assert batch.scored_indices.tolist() == [5, 6]
    assert batch.scored_sequences.tolist() == [1, 1]
    assert batch.rows.tolist() == [rows.row_of("a"), rows.row_of("b")]
    assert batch.token_ids.dtype == np.int32


def assert_equal_batches(batch: ForwardBatch, expected: ForwardBatch) -> None:
    for field in fields(ForwardBatch):
        for found, wanted in zip(*(np.atleast_2d(getattr(b, field.name)) for b in (batch, expected)), strict=True):
            assert found.dtype == wanted.dtype
            assert found.tolist() == wanted.tolist(), field.name


def test_batches_of_steps_that_go_on_are_made_from_the_last_and_equal_those_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = RequestRows(max_num_seqs=4, max_model_len=64, block_size=8, num_kv_groups=2)
    builder, anew = BatchBuilder(rows, 8), []

    def build_anew(*args: object) -> ForwardBatch:
        anew.append(step)
        return build_forward_batch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(forward_batch, "build_forward_batch", build_anew)
    lengths = {"a": 19, "b": 5}
    for name, length in lengths.items():
        row = rows.acquire(name, length, rope_variant=0)
        rows.append_tokens(row, list(range(100, 101 + length)))
        rows.append_blocks(row, ((7, 3, 5), (4, 1, 2)))
    new = NewRequestData(3, SamplingParams(), seed=0)
    for step in range(12):
        if step == 8:  # the same id, another request
            rows.release("a")
            row = rows.acquire("a", 3, rope_variant=0)
            rows.append_tokens(row, [1, 2, 3])
            rows.append_blocks(row, ((9, 10), (11, 12)))
            lengths["a"] = 2
        names = ("b",) if step == 4 else ("b", "a") if step < 10 else ("a", "b")
        has_block = step == 6
        plan = SchedulerOutput([
            ScheduledRequest(
                name,
                lengths[name],
                1,
                new_block_ids=((20 + step,), (30 + step,)) if has_block and name == "a" else ((), ()),
                first_logits_index=lengths[name],
                new_request=new if step == 8 and name == "a" else None,
            )
            for name in names
        ])  # fmt: skip
        if has_block:
            rows.append_blocks(rows.row_of("a"), ((20 + step,), (30 + step,)))
        assert_equal_batches(builder.build(plan), build_forward_batch(plan, rows, 8))
        for name in names:
            lengths[name] += 1
            rows.append_tokens(rows.row_of(name), [200 + step])
    assert anew == [0, 4, 5, 8, 10]
