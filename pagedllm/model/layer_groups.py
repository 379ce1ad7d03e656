"""Which layers share the blocks of the KV cache: layers with equal windows, in groups of one size.

Equal sizes let one pool serve all groups (kv_groups.py). Where the numbers of layers have no good common divisor the
last group of a kind is not full, and its blocks waste what the missing layers would take; larger groups waste more,
smaller ones cost a block table each.

    26 layers of Gemma 3, 22 with a window: groups of 4, one without a window, six with one of which the last holds 2
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pagedllm.model.config import ModelConfig

MAX_PADDING = 1 / 6  # of a kind's layers: Gemma 3 27B's 10 without a window in a group of 11 waste 10 %


def group_layers(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """The model with the KV group of each layer set; a window that no text of max_model_len leaves is none."""
    windows = [layer.attention.window for layer in config.layers]
    windows = [0 if window >= max_model_len else window for window in windows]
    size = _group_size(Counter(windows))
    first_group: dict[int, int] = {}  # of each window, in order of first use
    num_groups = 0
    for window, count in Counter(windows).items():
        first_group[window] = num_groups
        num_groups += -(-count // size)
    seen: Counter[int] = Counter()
    layers = []
    for layer, window in zip(config.layers, windows, strict=True):
        group = first_group[window] + seen[window] // size
        seen[window] += 1
        layers.append(replace(layer, attention=replace(layer.attention, kv_group=group)))
    return replace(config, layers=tuple(layers))


def _group_size(num_layers: Counter[int]) -> int:
    """num_layers: by window. Of the sizes that waste little of any kind, the one with the fewest groups, then layers.

    Of any kind, because in a long text one of them has most of the blocks.
    """
    sizes = range(1, 1 + max(num_layers.values()))
    good = [size for size in sizes if all(-n % size <= MAX_PADDING * n for n in num_layers.values())]
    return min(good, key=lambda size: (sum(-(-n // size) for n in num_layers.values()), size))
