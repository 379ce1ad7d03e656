"""Qwen 3, dense: q and k are normed per head; a window on the upper layers where the config asks for it."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import LLAMA_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "Qwen3ForCausalLM"
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, default_head_dim=128)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    has_attention_bias = reader.boolean("attention_bias", False)
    windows = read_windows(reader, sizes.num_layers)
    layers = tuple(LayerConfig(AttentionKind(window=window, rope=rope)) for window in windows)
    max_position = stretched_length(rope, sizes.max_position)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=max_position),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="head",
    )


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Per layer; 0 is none."""
    is_windowed = reader.boolean("use_sliding_window", False)
    window = reader.integer("sliding_window", 0)
    first_windowed = reader.integer("max_window_layers", num_layers, minimum=0)
    types = reader.texts("layer_types", num_layers, LAYER_TYPES)
    if not is_windowed:
        window = 0
    if types is None:
        return tuple(window if layer >= first_windowed else 0 for layer in range(num_layers))
    if "sliding_attention" in types and window == 0:
        raise reader.error(
            "layer_types", "asks for sliding_attention, but use_sliding_window or sliding_window is unset"
        )
    return tuple(window if layer_type == "sliding_attention" else 0 for layer_type in types)


FAMILY = Family(ARCHITECTURE, "qwen3", read_config, {**LLAMA_NAMES, **QK_NORM_NAMES})
