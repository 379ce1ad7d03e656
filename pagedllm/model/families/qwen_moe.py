"""Qwen 2 MoE (with an expert that all tokens pass) and Qwen 3 MoE; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, MoeConfig
from pagedllm.model.families._common import (
    LOCAL_EXPERT_NAMES,
    read_experts_per_token,
    read_layer_types,
    read_num_experts,
    read_sizes,
    read_window,
    usual_config,
)
from pagedllm.model.family import LLAMA_NAMES, QK_NORM_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope, stretched_length

MLP = "model.layers.*.mlp"
SHARED_NAMES = {
    "layers.*.shared.gate": f"{MLP}.shared_expert.gate_proj",
    "layers.*.shared.up": f"{MLP}.shared_expert.up_proj",
    "layers.*.shared.down": f"{MLP}.shared_expert.down_proj",
    "layers.*.shared_gate": f"{MLP}.shared_expert_gate",
}


def read_qwen2_config(reader: ConfigReader) -> ModelConfig:
    has_window = reader.boolean("use_sliding_window", False)
    first_full = reader.integer("max_window_layers", 28, minimum=0)
    sizes_layers = reader.integer("num_hidden_layers")
    # transformers 5 gives the window to every other one of the lower layers
    types = read_layer_types(reader, sizes_layers, lambda layer: has_window and layer % 2 == 0 and layer < first_full)
    is_windowed = tuple(has_window and is_local for is_local in types)
    window = read_window(reader, is_windowed, 4096) if has_window else 0
    reader.take("sliding_window", 0)  # 0 or any number, unused without use_sliding_window
    config = _read(reader, "Qwen2MoeForCausalLM", tuple(window if local else 0 for local in is_windowed))
    assert config.moe is not None
    shared_size = reader.integer("shared_expert_intermediate_size", 5632)
    return replace(
        config,
        has_qkv_bias=reader.boolean("qkv_bias", True),
        moe=replace(config.moe, shared_intermediate_size=shared_size),
    )


def read_qwen3_config(reader: ConfigReader) -> ModelConfig:
    has_window = reader.boolean("use_sliding_window", False)
    window = reader.integer("sliding_window", 0 if reader.is_given("sliding_window") else 4096, minimum=0)
    reader.integer("max_window_layers", 0, minimum=0)  # the window is on every layer or on none
    windows = (window if has_window else 0,) * reader.integer("num_hidden_layers")
    has_attention_bias = reader.boolean("attention_bias", False)
    return replace(
        _read(reader, "Qwen3MoeForCausalLM", windows),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="head",
    )


def _read(reader: ConfigReader, architecture: str, windows: tuple[int, ...]) -> ModelConfig:
    sizes = read_sizes(reader)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10_000.0)
    num_experts = read_num_experts(reader)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=read_experts_per_token(reader, num_experts, None),
        intermediate_size=reader.integer("moe_intermediate_size"),
        is_normalized=reader.boolean("norm_topk_prob", False),
    )
    layers = tuple(
        LayerConfig(AttentionKind(window=window, rope=rope), is_sparse)
        for window, is_sparse in zip(windows, read_sparse_layers(reader, sizes.num_layers), strict=True)
    )
    max_position = stretched_length(rope, sizes.max_position)
    return replace(usual_config(reader, architecture, sizes, layers, max_position=max_position), moe=moe)


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step = reader.integer("decoder_sparse_step", 1)
    dense: object = reader.take("mlp_only_layers", [])
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise reader.error("mlp_only_layers", f"must be a list of layers, got {dense!r:.60}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_config, {**LLAMA_NAMES, **LOCAL_EXPERT_NAMES, **SHARED_NAMES}
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_config, {**LLAMA_NAMES, **QK_NORM_NAMES, **LOCAL_EXPERT_NAMES}
)
