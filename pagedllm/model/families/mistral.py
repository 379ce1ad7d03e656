"""Mistral and Ministral: a window on every layer, on those of layer_types, or on none."""

from __future__ import annotations

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_layer_types, read_sizes, read_window, usual_config
from pagedllm.model.family import LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

DEFAULT_WINDOW = 4096  # where the config does not name sliding_window at all


def read_config(reader: ConfigReader) -> ModelConfig:
    """All layers alike."""
    return _read(reader, "MistralForCausalLM", None)


def read_ministral_config(reader: ConfigReader) -> ModelConfig:
    num_layers = reader.integer("num_hidden_layers")
    has_window = reader.has("sliding_window") or not reader.is_given("sliding_window")
    return _read(reader, "MinistralForCausalLM", read_layer_types(reader, num_layers, lambda _: has_window))


def _read(reader: ConfigReader, architecture: str, is_windowed: tuple[bool, ...] | None) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    window = read_window(reader, is_windowed or (), DEFAULT_WINDOW)
    is_windowed = is_windowed or (True,) * sizes.num_layers
    layers = tuple(LayerConfig(AttentionKind(window=window if has else 0, rope=rope)) for has in is_windowed)
    return usual_config(reader, architecture, sizes, layers, max_position=stretched_length(rope, sizes.max_position))


FAMILY = Family("MistralForCausalLM", "mistral", read_config, LLAMA_NAMES)
MINISTRAL = Family("MinistralForCausalLM", "ministral", read_ministral_config, LLAMA_NAMES)
