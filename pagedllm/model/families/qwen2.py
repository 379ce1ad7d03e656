"""Qwen 2 and 2.5: biases on q, k and v; a window on the upper layers where the config asks for it."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.families.qwen3 import read_windows
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    windows = read_windows(reader, sizes.num_layers)
    layers = tuple(LayerConfig(AttentionKind(window=window, rope=rope)) for window in windows)
    max_position = stretched_length(rope, sizes.max_position)
    config = usual_config(reader, ARCHITECTURE, sizes, layers, max_position=max_position)
    return replace(config, has_qkv_bias=True)


FAMILY = Family(ARCHITECTURE, "qwen2", read_config, LLAMA_NAMES, (IGNORABLE_INV_FREQ,))
