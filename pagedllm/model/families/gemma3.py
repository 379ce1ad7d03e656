"""Gemma 3, text: local layers with a window and their own rope, four norms a layer, norms stored as w of 1 + w."""

from __future__ import annotations

import math
from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, RopeConfig
from pagedllm.model.families._common import Sizes, read_sizes, usual_config
from pagedllm.model.family import LLAMA_NAMES, POST_NORM_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope_object

ARCHITECTURE = "Gemma3ForCausalLM"
LOCAL, GLOBAL = "sliding_attention", "full_attention"
DEFAULT_THETAS = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}

WEIGHT_NAMES = {
    **LLAMA_NAMES,
    **QK_NORM_NAMES,
    **POST_NORM_NAMES,
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
}


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, default_head_dim=256)
    if reader.boolean("use_bidirectional_attention", False):
        raise reader.error("use_bidirectional_attention", "is true: this is an embedding model, it does not generate")
    has_attention_bias = reader.boolean("attention_bias", False)
    config = usual_config(
        reader,
        ARCHITECTURE,
        sizes,
        read_layers(reader, sizes),
        max_position=sizes.max_position,  # after scaling, unlike Llama's
        is_tied_default=True,
        activation_key="hidden_activation",
    )
    return replace(
        config,
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=math.sqrt(sizes.hidden_size),
        is_embedding_scale_rounded=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="head",
        has_post_norms=True,
        norm_weight_offset=1.0,
        logit_softcap=reader.number("final_logit_softcapping", 0.0),
    )


def read_layers(reader: ConfigReader, sizes: Sizes) -> tuple[LayerConfig, ...]:
    ropes = read_ropes(reader, sizes)
    window = reader.integer("sliding_window", None)
    softcap = reader.number("attn_logit_softcapping", 0.0)
    old_pattern = reader.integer("_sliding_window_pattern", 6)  # transformers writes both names
    pattern = reader.integer("sliding_window_pattern", old_pattern)
    types = reader.texts("layer_types", sizes.num_layers, (LOCAL, GLOBAL))
    if types is None:
        types = tuple(LOCAL if (layer + 1) % pattern else GLOBAL for layer in range(sizes.num_layers))
    if LOCAL in types and window is None:
        raise reader.error("sliding_window", "is null, but there are layers of sliding_attention")
    kinds = {
        LOCAL: LayerConfig(AttentionKind(window=window or 0, rope=ropes[LOCAL], softcap=softcap)),
        GLOBAL: LayerConfig(AttentionKind(rope=ropes[GLOBAL], softcap=softcap)),
    }
    return tuple(kinds[layer_type] for layer_type in types)


def read_ropes(reader: ConfigReader, sizes: Sizes) -> dict[str, RopeConfig]:
    """Per type of layer. The old spelling scales the global rope only."""
    thetas = {GLOBAL: reader.number("rope_theta", None), LOCAL: reader.number("rope_local_base_freq", None)}
    by_type, scaling = reader.nested("rope_parameters"), reader.nested("rope_scaling")
    ropes = {}
    for layer_type, default_theta in DEFAULT_THETAS.items():
        found = [by_type.nested(layer_type)] if by_type else []
        if layer_type == GLOBAL:
            found.append(scaling)
        candidates = [
            read_rope_object(
                nested,
                head_dim=sizes.head_dim,
                max_position=sizes.max_position,
                theta=thetas[layer_type],
                default_theta=default_theta,
            )
            for nested in found
            if nested
        ]
        if candidates and candidates[0] != candidates[-1]:
            raise reader.error("rope_scaling", f"says {candidates[-1]}, but rope_parameters says {candidates[0]}")
        ropes[layer_type] = (
            candidates[0] if candidates else RopeConfig(thetas[layer_type] or default_theta, sizes.head_dim)
        )
    if by_type:
        by_type.finish_nested()
    return ropes


FAMILY = Family(ARCHITECTURE, "gemma3_text", read_config, WEIGHT_NAMES)
