"""SmolLM 3: every fourth layer without rotation, and a window on those where the config asks for it."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import Sizes, read_layer_types, read_sizes, read_window, usual_config
from pagedllm.model.family import LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

ARCHITECTURE = "SmolLM3ForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=2_000_000.0)
    has_rope = read_rope_layers(reader, sizes)
    reader.integer("max_window_layers", None, minimum=0)  # which transformers does not look at
    may_have_window = reader.boolean("use_sliding_window", False)
    has_window = reader.has("sliding_window")
    types = read_layer_types(reader, sizes.num_layers, lambda layer: has_window and not has_rope[layer])
    is_windowed = tuple(may_have_window and is_local for is_local in types)
    window = read_window(reader, is_windowed, None)
    layers = tuple(
        LayerConfig(AttentionKind(window=window if is_local else 0, rope=rope if turns else None))
        for is_local, turns in zip(is_windowed, has_rope, strict=True)
    )
    max_position = stretched_length(rope, sizes.max_position)
    has_attention_bias = reader.boolean("attention_bias", False)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=max_position, is_tied_default=True),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
    )


def read_rope_layers(reader: ConfigReader, sizes: Sizes) -> tuple[bool, ...]:
    """Whether each layer rotates: no_rope_layers says 1 for those that do."""
    interval = reader.integer("no_rope_layer_interval", 4)
    flags = reader.take("no_rope_layers", None)
    if flags is None:
        return tuple((layer + 1) % interval != 0 for layer in range(sizes.num_layers))
    if not isinstance(flags, list) or len(flags) != sizes.num_layers or any(flag not in (0, 1) for flag in flags):
        raise reader.error("no_rope_layers", f"must be a list of {sizes.num_layers} zeros and ones, got {flags!r:.60}")
    return tuple(map(bool, flags))


FAMILY = Family(ARCHITECTURE, "smollm3", read_config, LLAMA_NAMES)
