"""Granite 3: Llama with multipliers of embedding, attention scores, what joins the residual stream, and logits.

The residual stream h' = h / residual_multiplier needs no multiplication where attention and MLP join it, and every norm
of it is the norm of h if eps is divided by the square: so only the embedding's scale and eps change.
"""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "GraniteForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    has_attention_bias = reader.boolean("attention_bias", False)
    residual_multiplier = reader.number("residual_multiplier", 1.0)
    if not 1e-3 <= residual_multiplier <= 1e3:
        raise reader.error("residual_multiplier", f"must be in [0.001, 1000], got {residual_multiplier:g}")
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position)),
        norm_eps=sizes.norm_eps / residual_multiplier**2,
        embedding_scale=reader.number("embedding_multiplier", 1.0) / residual_multiplier,
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
    )


FAMILY = Family(ARCHITECTURE, "granite", read_config, LLAMA_NAMES)
