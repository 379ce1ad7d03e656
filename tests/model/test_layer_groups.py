"""Which layers share blocks: real models' patterns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagedllm.kv_groups import UNBOUNDED, KVGroups
from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.layer_groups import group_layers
from pagedllm.model.registry import read_model_config
from tests.model.configs import REAL_CONFIGS

W = 512


def grouped(windows: list[int], max_model_len: int = 8192) -> ModelConfig:
    layers = tuple(LayerConfig(AttentionKind(window=window)) for window in windows)
    config = read_model_config(REAL_CONFIGS["smollm2"], Path("config"))
    return group_layers(replace(config, layers=layers), max_model_len)


def groups_of(config: ModelConfig) -> list[int]:
    return [layer.attention.kv_group for layer in config.layers]


@pytest.mark.parametrize(
    ("windows", "groups", "kv_windows", "size"),
    [
        ([0] * 3, [0, 0, 0], (0,), 3),
        ([W] * 3, [0, 0, 0], (W,), 3),
        ([W, 0] * 2, [0, 1, 0, 1], (W, 0), 2),  # Gemma 2, gpt-oss
        ([W, W, W, 0] * 2, [0, 0, 1, 3, 1, 2, 2, 3], (W, W, W, 0), 2),  # Cohere 2
        ([W, 0, W], [0, 2, 1], (W, W, 0), 1),
        ([W, 2 * W, 0], [0, 1, 2], (W, 2 * W, 0), 1),
        ([0, 9000], [0, 0], (0,), 2),  # no text leaves this window
    ],
)
def test_layers_with_equal_windows_fill_groups_of_one_size(
    windows: list[int], groups: list[int], kv_windows: tuple[int, ...], size: int
) -> None:
    config = grouped(windows)
    assert groups_of(config) == groups
    assert config.kv_windows == kv_windows
    assert config.num_layers_per_block == size


def test_gemma_3_gets_few_groups_and_little_padding() -> None:
    one_b = grouped([0 if i % 6 == 5 else W for i in range(26)])
    assert (one_b.num_kv_groups, one_b.num_layers_per_block) == (7, 4)
    twelve_b = grouped([0 if i % 6 == 5 else W for i in range(48)])
    assert (twelve_b.num_kv_groups, twelve_b.num_layers_per_block) == (6, 8)
    large = grouped([0 if i % 6 == 5 else W for i in range(62)])
    assert (large.num_kv_groups, large.num_layers_per_block) == (6, 11)


def test_a_group_keeps_the_window_and_what_a_step_adds() -> None:
    groups = KVGroups(16, (0, 512), 512)
    assert groups.num_blocks(512) == 64
    assert groups.num_blocks(8192) == 512 + 65  # 1,023 tokens that begin anywhere
    assert groups.num_left_behind(1, 511) == 0
    assert groups.num_left_behind(1, 526) == 0
    assert groups.num_left_behind(1, 527) == 1  # token 527 sees 16 .. 527
    assert groups.num_left_behind(0, 527) == 0


@pytest.mark.parametrize(("num_blocks", "longest"), [(1, 0), (2, 4), (5, 8), (6, 12), (7, 16), (8, 20)])
def test_the_longest_text_is_the_one_whose_blocks_fit(num_blocks: int, longest: int) -> None:
    groups = KVGroups(4, (0, 5), 4)  # the group with a window holds at most three
    assert groups.longest_text(num_blocks) == longest


def test_with_windows_only_a_text_of_any_length_fits() -> None:
    groups = KVGroups(4, (5, 9), 4)
    assert groups.longest_text(7) == UNBOUNDED
    assert groups.longest_text(6) == 12


def test_windows_are_numbers() -> None:
    with pytest.raises(ValueError, match=r"windows must be numbers >= 0, at least one, got \(0, -1\)"):
        KVGroups(16, (0, -1))
