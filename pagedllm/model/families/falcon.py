"""Falcon: LayerNorms, an MLP without a gate, few KV heads; attention and MLP in parallel with one norm or two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import MAX_LAYERS, Sizes, divided_head_dim, refuse_unless, usual_config
from pagedllm.model.family import Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "FalconForCausalLM"
LAYER = "transformer.h.*"
WEIGHT_NAMES = {
    "embedding": "transformer.word_embeddings",
    "head": "lm_head",
    "final_norm": "transformer.ln_f",
    "layers.*.attention_norm": f"{LAYER}.input_layernorm",
    "layers.*.mlp_norm": f"{LAYER}.post_attention_layernorm",
    "layers.*.q": f"{LAYER}.self_attention.query_key_value",
    "layers.*.k": f"{LAYER}.self_attention.query_key_value",
    "layers.*.v": f"{LAYER}.self_attention.query_key_value",
    "layers.*.output": f"{LAYER}.self_attention.dense",
    "layers.*.up": f"{LAYER}.mlp.dense_h_to_4h",
    "layers.*.down": f"{LAYER}.mlp.dense_4h_to_h",
}
IGNORABLE = (r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",)


def names_for(config: ModelConfig) -> Mapping[str, str]:
    if not (config.is_parallel and config.has_mlp_norm):
        return {}
    return {"layers.*.attention_norm": f"{LAYER}.ln_attn", "layers.*.mlp_norm": f"{LAYER}.ln_mlp"}


def read_config(reader: ConfigReader) -> ModelConfig:
    if reader.boolean("alibi", False):
        raise reader.error("alibi", "is true: scores that fall with the distance are not supported by the kernels")
    refuse_unless(reader, {"apply_residual_connection_post_layernorm": False})
    is_new = reader.boolean("new_decoder_architecture", False)
    is_parallel = reader.boolean("parallel_attn", True)
    num_norms = reader.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if (not is_new and num_norms != 1) or num_norms > 2:
        raise reader.error("num_ln_in_parallel_attn", f"is {num_norms}, which is not supported here")
    if is_new and not is_parallel:
        raise reader.error("parallel_attn", "is false, which new_decoder_architecture contradicts")
    sizes = read_falcon_sizes(reader, is_new)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    has_bias = reader.boolean("bias", False)
    config = usual_config(
        reader,
        ARCHITECTURE,
        sizes,
        (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers,
        max_position=stretched_length(rope, sizes.max_position),
        is_tied_default=True,
        activation_key="activation",
        default_activation="gelu",
    )
    return replace(
        config,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        has_gated_mlp=False,
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel or num_norms == 2,
    )


def read_falcon_sizes(reader: ConfigReader, is_new: bool) -> Sizes:
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_kv_heads", num_heads)
    if reader.boolean("multi_query", True) and not is_new:
        num_kv_heads = 1
    if num_heads % num_kv_heads or (not is_new and num_kv_heads not in (1, num_heads)):
        raise reader.error("num_kv_heads", f"is {num_kv_heads}, which does not fit {num_heads} heads")
    return Sizes(
        hidden_size=hidden_size,
        intermediate_size=reader.integer("ffn_hidden_size", 4 * hidden_size),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=divided_head_dim(reader, "hidden_size", hidden_size, num_heads),
        vocab_size=reader.integer("vocab_size"),
        max_position=reader.integer("max_position_embeddings", 2048),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
    )


FAMILY = Family(
    ARCHITECTURE, "falcon", read_config, WEIGHT_NAMES, IGNORABLE, names_for=names_for, is_fused_by_kv_head=True
)
