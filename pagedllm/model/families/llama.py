"""Llama 1-3 and what kept their shape: SmolLM2, TinyLlama, Vicuna, Yi, DeepSeek distillations ..."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "LlamaForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, default_head_dim=None)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    has_attention_bias = reader.boolean("attention_bias", False)
    layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    max_position = stretched_length(rope, sizes.max_position)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=max_position),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
    )


FAMILY = Family(ARCHITECTURE, "llama", read_config, LLAMA_NAMES, (IGNORABLE_INV_FREQ,))
