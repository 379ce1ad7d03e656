"""Gemma 2: every other layer with a window, four norms a layer stored as w of 1 + w, scores and logits capped."""

from __future__ import annotations

import math
from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_layer_types, read_sizes, read_window, usual_config
from pagedllm.model.family import LLAMA_NAMES, POST_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "Gemma2ForCausalLM"
WEIGHT_NAMES = {
    **LLAMA_NAMES,
    **POST_NORM_NAMES,
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
}


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader, default_head_dim=256)
    if reader.boolean("use_bidirectional_attention", False):
        raise reader.error("use_bidirectional_attention", "is true: this is an embedding model, it does not generate")
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    is_windowed = read_layer_types(reader, sizes.num_layers, lambda layer: layer % 2 == 0)
    window = read_window(reader, is_windowed, 4096)
    softcap = read_softcap(reader, "attn_logit_softcapping", 50.0)
    layers = tuple(
        LayerConfig(AttentionKind(window=window if is_local else 0, rope=rope, softcap=softcap))
        for is_local in is_windowed
    )
    has_attention_bias = reader.boolean("attention_bias", False)
    activation_key = "hidden_activation" if reader.has("hidden_activation") else "hidden_act"
    reader.text("hidden_act", None)  # beside hidden_activation it stands unused
    max_position = stretched_length(rope, sizes.max_position)
    return replace(
        usual_config(
            reader, ARCHITECTURE, sizes, layers,
            max_position=max_position, is_tied_default=True, activation_key=activation_key,
        ),
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=math.sqrt(sizes.hidden_size),
        is_embedding_scale_rounded=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_post_norms=True,
        norm_weight_offset=1.0,
        logit_softcap=read_softcap(reader, "final_logit_softcapping", 30.0),
    )  # fmt: skip


def read_softcap(reader: ConfigReader, key: str, default: float) -> float:
    """Null is none; absent is transformers' default."""
    return reader.number(key, 0.0 if reader.is_given(key) else default)


FAMILY = Family(ARCHITECTURE, "gemma2", read_config, WEIGHT_NAMES)
