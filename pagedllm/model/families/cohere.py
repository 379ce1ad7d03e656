"""Cohere's Command-R, and Command-R7B (Cohere 2): one LayerNorm without bias before attention and MLP in parallel.

Neighbouring features are rotated. Command-R+ norms each head of q and k; Cohere 2 rotates on the layers that have a
window only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import (
    Sizes,
    read_layer_types,
    read_sizes,
    read_window,
    refuse_unless,
    usual_config,
)
from pagedllm.model.family import LLAMA_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

# Cohere's words for what is so in every model; files of Command-R7B have them.
NEUTRAL = {
    "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": False,
}  # fmt: skip


def read_config(reader: ConfigReader) -> ModelConfig:
    has_qk_norm = reader.boolean("use_qk_norm", False)  # Command-R+
    config = _read(reader, "CohereForCausalLM", 500_000.0, lambda sizes: None)
    # max_position_embeddings says 8192 where the model was trained on 128k
    longest = reader.integer("model_max_length", config.max_position)
    return replace(config, max_position=longest, qk_norm="layer_head" if has_qk_norm else "none")


def read_cohere2_config(reader: ConfigReader) -> ModelConfig:
    refuse_unless(reader, NEUTRAL)
    old_pattern = reader.integer("_sliding_window_pattern", 4)
    pattern = reader.integer("sliding_window_pattern", old_pattern)

    def is_windowed(sizes: Sizes) -> tuple[bool, ...]:
        return read_layer_types(reader, sizes.num_layers, lambda layer: (layer + 1) % pattern != 0)

    return _read(reader, "Cohere2ForCausalLM", 10_000.0, is_windowed)


def _read(
    reader: ConfigReader,
    architecture: str,
    default_theta: float,
    read_is_windowed: Callable[[Sizes], tuple[bool, ...] | None],
) -> ModelConfig:
    sizes = read_sizes(reader, eps_key="layer_norm_eps")
    rope = read_rope(
        reader,
        head_dim=sizes.head_dim,
        max_position=sizes.max_position,
        default_theta=default_theta,
        is_interleaved=True,
    )
    is_windowed = read_is_windowed(sizes)
    if is_windowed is None:
        layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    else:
        local = LayerConfig(AttentionKind(window=read_window(reader, is_windowed, 4096), rope=rope))
        layers = tuple(local if is_local else LayerConfig(AttentionKind()) for is_local in is_windowed)
    has_attention_bias = reader.boolean("attention_bias", False)
    max_position = stretched_length(rope, sizes.max_position)
    return replace(
        usual_config(reader, architecture, sizes, layers, max_position=max_position, is_tied_default=True),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        norm_kind="layer",
        is_parallel=True,
        has_mlp_norm=False,
        logit_scale=reader.number("logit_scale", 0.0625),
    )


FAMILY = Family("CohereForCausalLM", "cohere", read_config, {**LLAMA_NAMES, **QK_NORM_NAMES})
COHERE2 = Family("Cohere2ForCausalLM", "cohere2", read_cohere2_config, LLAMA_NAMES)
