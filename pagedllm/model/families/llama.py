"""Llama 1-3 and what kept their shape: SmolLM2, TinyLlama, Vicuna, Yi, DeepSeek distillations ..."""

from __future__ import annotations

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_bos, read_sizes
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "LlamaForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, default_head_dim=None)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    has_attention_bias = reader.boolean("attention_bias", False)
    return ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        max_position=stretched_length(rope, sizes.max_position),
        norm_eps=sizes.norm_eps,
        activation=reader.activation("hidden_act"),
        layers=(LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers,
        attention_scale=sizes.head_dim**-0.5,
        is_tied=reader.boolean("tie_word_embeddings", False),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=read_bos(reader),
    )


FAMILY = Family(ARCHITECTURE, "llama", read_config, LLAMA_NAMES, (IGNORABLE_INV_FREQ,))
