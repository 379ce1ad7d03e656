"""OLMo 2: norms after attention and MLP only; q and k normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import LLAMA_NAMES, POST_NORM_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "Olmo2ForCausalLM"
WEIGHT_NAMES = {
    **LLAMA_NAMES,
    **QK_NORM_NAMES,
    **POST_NORM_NAMES,
}


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    has_attention_bias = reader.boolean("attention_bias", False)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position)),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="projection",
        has_pre_norms=False,
        has_post_norms=True,
    )


FAMILY = Family(ARCHITECTURE, "olmo2", read_config, WEIGHT_NAMES)
