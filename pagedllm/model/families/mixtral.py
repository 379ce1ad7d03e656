"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, MoeConfig
from pagedllm.model.families._common import read_experts_per_token, read_sizes, usual_config
from pagedllm.model.family import LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "MixtralForCausalLM"
BLOCK = "model.layers.*.block_sparse_moe"
WEIGHT_NAMES = {
    **LLAMA_NAMES,
    "layers.*.router": f"{BLOCK}.gate",
    "layers.*.experts.*.gate": f"{BLOCK}.experts.*.w1",
    "layers.*.experts.*.up": f"{BLOCK}.experts.*.w3",
    "layers.*.experts.*.down": f"{BLOCK}.experts.*.w2",
}


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=1_000_000.0)
    window = reader.integer("sliding_window", 0)
    layers = (LayerConfig(AttentionKind(window=window, rope=rope), is_sparse=True),) * sizes.num_layers
    num_experts = reader.integer("num_local_experts", 8)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=read_experts_per_token(reader, num_experts, 2),
        intermediate_size=sizes.intermediate_size,
        is_normalized=True,
    )
    max_position = stretched_length(rope, sizes.max_position)
    return replace(usual_config(reader, ARCHITECTURE, sizes, layers, max_position=max_position), moe=moe)


FAMILY = Family(ARCHITECTURE, "mixtral", read_config, WEIGHT_NAMES)
