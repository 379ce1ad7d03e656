"""OLMoE: a mixture of experts in every layer; q and k normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, MoeConfig
from pagedllm.model.families._common import (
    LOCAL_EXPERT_NAMES,
    read_experts_per_token,
    read_num_experts,
    read_sizes,
    usual_config,
)
from pagedllm.model.family import LLAMA_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "OlmoeForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    num_experts = read_num_experts(reader)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=read_experts_per_token(reader, num_experts, 8),
        intermediate_size=sizes.intermediate_size,
        is_normalized=reader.boolean("norm_topk_prob", False),
    )
    layers = (LayerConfig(AttentionKind(rope=rope), is_sparse=True),) * sizes.num_layers
    has_attention_bias = reader.boolean("attention_bias", False)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position)),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="projection",
        qkv_clip=reader.number("clip_qkv", 0.0),
        moe=moe,
    )


FAMILY = Family(ARCHITECTURE, "olmoe", read_config, {**LLAMA_NAMES, **QK_NORM_NAMES, **LOCAL_EXPERT_NAMES})
