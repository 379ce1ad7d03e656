"""Rope tables are transformers' to the bit or nearly so; variants are fixed by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedllm.model.config import RopeConfig
from pagedllm.model.registry import read_model_config
from pagedllm.model.rope import RopeTables, rope_table

ORIGINAL = 1024
FACTORS = [1.0 + 0.05 * i for i in range(64)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 0.9,
        "beta_fast": 64.0,
        "beta_slow": 0.5,
    },
    "yarn with mscale, not truncated": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [4 * f for f in FACTORS],
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope with factor and attention factor": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [4 * f for f in FACTORS],
        "original_max_position_embeddings": ORIGINAL,
        "factor": 16.0,
        "attention_factor": 1.19,
    },
}


def read_both(parameters: dict[str, Any], max_position: int) -> tuple[RopeConfig, LlamaRotaryEmbedding]:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
        architectures=["LlamaForCausalLM"],
    )
    rope = read_model_config(config.to_dict(), Path("model")).ropes[0]
    return rope, LlamaRotaryEmbedding(config)


def theirs_at(rotary: LlamaRotaryEmbedding, positions: list[int]) -> torch.Tensor:
    """[len(positions), rotary_dim]: cosines, then sines, of the first half of the features."""
    cos, sin = rotary(torch.zeros(1), torch.tensor([positions]))
    return torch.cat((cos[0, :, :64], sin[0, :, :64]), -1)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str) -> None:
    rope, rotary = read_both(KINDS[kind], max_position=4 * ORIGINAL)
    positions = [0, 1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL]
    ours = rope_table(rope, 4 * ORIGINAL + 1, num_total_tokens=4 * ORIGINAL + 1)[positions]
    torch.testing.assert_close(ours, theirs_at(rotary, positions), rtol=0, atol=1e-6)


def test_longrope_within_the_original_length_uses_the_short_factors() -> None:
    rope, rotary = read_both(KINDS["longrope"], max_position=4 * ORIGINAL)
    positions = [0, 1, ORIGINAL - 1]
    ours = rope_table(rope, ORIGINAL, num_total_tokens=ORIGINAL)[positions]
    torch.testing.assert_close(ours, theirs_at(rotary, positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("num_total_tokens", "as_of"), [(1, 1024), (1024, 1024), (1025, 2048), (2049, 4096)])
def test_dynamic_base_is_that_of_the_length_rounded_up(num_total_tokens: int, as_of: int) -> None:
    rope, rotary = read_both({"rope_type": "dynamic", "factor": 4.0}, max_position=ORIGINAL)
    theirs = theirs_at(rotary, [0, 1, 1000, as_of - 1])
    ours = rope_table(rope, as_of, num_total_tokens)[[0, 1, 1000, as_of - 1]]
    # transformers computes this base in float32: 1e-7 of a frequency of 1 is 4e-4 at position 4096
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)


def test_a_model_whose_ropes_never_change_has_one_variant() -> None:
    tables = RopeTables((RopeConfig(1e4, 32), RopeConfig(1e6, 32, "linear", 8.0)), 4096, 512)
    assert tables.num_variants == 1
    assert [tables.variant(n) for n in (1, 4096, 9999, None)] == [0, 0, 0, 0]
    assert [tables.row_offset(rope, 0) for rope in (0, 1)] == [0, 0]
    assert [tuple(table.shape) for table in tables.tables] == [(512, 32), (512, 32)]


def test_dynamic_variants_double() -> None:
    tables = RopeTables((RopeConfig(1e4, 32, "dynamic", 6.0, 100),), 600, 250)
    assert tables.num_variants == 4  # up to 100, 200, 400 and 600 tokens
    assert [tables.variant(n) for n in (1, 100, 101, 200, 201, 400, 401, 600, 10_000)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert [tables.row_offset(0, variant) for variant in range(4)] == [0, 100, 300, 550]
    assert tuple(tables.tables[0].shape) == (800, 32)  # 100 + 200 + 250 + 250 rows: max_model_len cuts


def test_a_request_without_limit_has_the_variant_of_the_length_in_the_config() -> None:
    longrope = RopeConfig(1e4, 32, "longrope", 4.0, 128, short_factors=(1.0,) * 16, long_factors=(2.0,) * 16)
    for max_model_len in (64, 128, 512):  # lowering it changes nobody's variant
        tables = RopeTables((longrope,), 512, max_model_len)
        assert [tables.variant(n) for n in (128, 129, None)] == [0, 1, 1]
        assert tables.row_offset(0, 1) == min(128, max_model_len)


def test_two_changing_ropes_share_their_variants() -> None:
    longrope = RopeConfig(1e4, 32, "longrope", 4.0, 150, short_factors=(1.0,) * 16, long_factors=(2.0,) * 16)
    dynamic = RopeConfig(1e4, 32, "dynamic", 4.0, 100)
    tables = RopeTables((longrope, dynamic, RopeConfig(1e4, 32)), 400, 400)
    assert tables.num_variants == 4  # up to 100, 150, 200, 400
    assert [tables.variant(n) for n in (100, 150, 200, 400)] == [0, 1, 2, 3]
    assert [tables.row_offset(0, v) for v in range(4)] == [0, 0, 150, 150]
    assert [tables.row_offset(1, v) for v in range(4)] == [0, 100, 100, 300]
    assert [tables.row_offset(2, v) for v in range(4)] == [0, 0, 0, 0]
    long_rows = tables.tables[0][150:]
    assert torch.equal(long_rows, rope_table(longrope, 400, 400))
