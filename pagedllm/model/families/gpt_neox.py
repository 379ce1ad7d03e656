"""GPT-NeoX, Pythia: LayerNorms, attention and MLP in parallel, a part of each head rotated, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import PartialRotary, read_rope, stretched_length

ARCHITECTURE = "GPTNeoXForCausalLM"
LAYER = "gpt_neox.layers.*"
WEIGHT_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "head": "embed_out",
    "final_norm": "gpt_neox.final_layer_norm",
    "layers.*.attention_norm": f"{LAYER}.input_layernorm",
    "layers.*.mlp_norm": f"{LAYER}.post_attention_layernorm",
    "layers.*.q": f"{LAYER}.attention.query_key_value",
    "layers.*.k": f"{LAYER}.attention.query_key_value",
    "layers.*.v": f"{LAYER}.attention.query_key_value",
    "layers.*.output": f"{LAYER}.attention.dense",
    "layers.*.up": f"{LAYER}.mlp.dense_h_to_4h",
    "layers.*.down": f"{LAYER}.mlp.dense_4h_to_h",
}
# Causal masks, and derived from the config; old checkpoints stored them.
IGNORABLE = (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, eps_key="layer_norm_eps")
    if sizes.num_kv_heads != sizes.num_q_heads:
        raise reader.error("num_key_value_heads", f"must be the number of heads {sizes.num_q_heads}")
    rope = read_rope(
        reader,
        head_dim=sizes.head_dim,
        max_position=sizes.max_position,
        default_theta=10_000.0,
        theta_key="rotary_emb_base",
        partial=PartialRotary(default=0.25, key="rotary_pct"),
    )
    layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    has_attention_bias = reader.boolean("attention_bias", True)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position)),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=True,
        has_gated_mlp=False,
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=reader.boolean("use_parallel_residual", True),
    )


FAMILY = Family(ARCHITECTURE, "gpt_neox", read_config, WEIGHT_NAMES, IGNORABLE, is_fused_by_kv_head=True)
