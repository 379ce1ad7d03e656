"""GPT-2: learned positions, LayerNorms, an MLP without a gate; weights stored as [in_features, out_features]."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import MAX_LAYERS, Sizes, divided_head_dim, refuse_unless, usual_config
from pagedllm.model.family import Family
from pagedllm.model.hf_config import ConfigReader

ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
LAYER = f"{PREFIX}h.*"
WEIGHT_NAMES = {
    "embedding": f"{PREFIX}wte",
    "positions": f"{PREFIX}wpe",
    "head": "lm_head",
    "final_norm": f"{PREFIX}ln_f",
    "layers.*.attention_norm": f"{LAYER}.ln_1",
    "layers.*.mlp_norm": f"{LAYER}.ln_2",
    "layers.*.q": f"{LAYER}.attn.c_attn",
    "layers.*.k": f"{LAYER}.attn.c_attn",
    "layers.*.v": f"{LAYER}.attn.c_attn",
    "layers.*.output": f"{LAYER}.attn.c_proj",
    "layers.*.up": f"{LAYER}.mlp.c_fc",
    "layers.*.down": f"{LAYER}.mlp.c_proj",
}
IGNORABLE = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)  # causal masks of old checkpoints


def read_config(reader: ConfigReader) -> ModelConfig:
    is_scaled_by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", False)
    reader.boolean("reorder_and_upcast_attn", False)  # scores are float32 here in any case
    hidden_size = reader.integer("n_embd")
    num_heads = reader.integer("n_head")
    max_position = reader.integer("n_positions")
    refuse_unless(reader, {"n_ctx": max_position})
    sizes = Sizes(
        hidden_size=hidden_size,
        intermediate_size=reader.integer("n_inner", 4 * hidden_size),
        num_layers=reader.integer("n_layer", maximum=MAX_LAYERS),
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divided_head_dim(reader, "n_embd", hidden_size, num_heads),
        vocab_size=reader.integer("vocab_size"),
        max_position=max_position,
        norm_eps=reader.number("layer_norm_epsilon"),
    )
    config = usual_config(
        reader,
        ARCHITECTURE,
        sizes,
        tuple(
            LayerConfig(AttentionKind(scale_divisor=layer + 1.0 if is_scaled_by_layer else 1.0))
            for layer in range(sizes.num_layers)
        ),
        max_position=max_position,
        is_tied_default=True,
        activation_key="activation_function",
    )
    return replace(
        config,
        attention_scale=config.attention_scale if reader.boolean("scale_attn_weights", True) else 1.0,
        has_learned_positions=True,
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
        has_gated_mlp=False,
        norm_kind="layer",
        has_norm_bias=True,
    )


FAMILY = Family(
    ARCHITECTURE, "gpt2", read_config, WEIGHT_NAMES, IGNORABLE, optional_prefix=PREFIX, has_transposed_weights=True
)
