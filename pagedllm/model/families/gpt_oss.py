"""gpt-oss: attention sinks, a window on every other layer, a mixture of experts with biases and a clamped gate.

All experts of a layer are stored as one tensor [experts, in_features, out_features], gate and up in turn, or in MXFP4.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, MoeConfig
from pagedllm.model.families._common import (
    read_experts_per_token,
    read_layer_types,
    read_num_experts,
    read_sizes,
    read_window,
    refuse_unless,
    usual_config,
)
from pagedllm.model.family import LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import read_rope
from pagedllm.model.linear import WeightSlot
from pagedllm.model.mxfp4 import Mxfp4Checkpoint, check_quantization
from pagedllm.ops.linear import Activation

ARCHITECTURE = "GptOssForCausalLM"
WEIGHT_NAMES = {
    **LLAMA_NAMES,
    "layers.*.sinks": "model.layers.*.self_attn",
    "layers.*.router": "model.layers.*.mlp.router",
}


def read_config(reader: ConfigReader) -> ModelConfig:
    check_quantization(reader)
    refuse_unless(reader, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"})
    sizes = read_sizes(reader, default_head_dim=64)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=150_000.0)
    is_windowed = read_layer_types(reader, sizes.num_layers, lambda layer: layer % 2 == 0)
    window = read_window(reader, is_windowed, 128)
    layers = tuple(
        LayerConfig(AttentionKind(window=window if is_local else 0, rope=rope, has_sinks=True), is_sparse=True)
        for is_local in is_windowed
    )
    num_experts = read_num_experts(reader)
    num_chosen = read_experts_per_token(reader, num_experts, 4)
    refuse_unless(reader, {"experts_per_token": num_chosen})  # the same by OpenAI's own name
    reader.integer("initial_context_length", None)  # what rope_scaling calls the original length
    has_attention_bias = reader.boolean("attention_bias", True)
    config = usual_config(reader, ARCHITECTURE, sizes, layers, max_position=sizes.max_position)
    return replace(
        config,
        activation=Activation.CLAMPED_SWISH,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=True,
        moe=MoeConfig(
            num_experts=num_experts,
            num_experts_per_token=num_chosen,
            intermediate_size=sizes.intermediate_size,
            is_normalized=True,  # a softmax over the chosen ones is the softmax over all, normalized
            has_router_bias=True,
        ),
    )


def own_slots(slots: dict[str, WeightSlot], config: ModelConfig) -> dict[str, WeightSlot]:
    """The stored tensors that hold several slots of a layer, by their names."""
    assert config.moe is not None
    stacked = {}
    for layer in range(config.num_layers):
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                experts = [
                    [slots.pop(f"layers.{layer}.experts.{expert}.{part}.{kind}") for part in parts]
                    for expert in range(config.moe.num_experts)
                ]
                stacked[f"model.layers.{layer}.mlp.experts.{name}{suffix}"] = _stack(experts)
    return stacked


def _stack(experts: list[list[WeightSlot]]) -> WeightSlot:
    """A tensor [experts, in_features, parts in turn], or a bias [experts, parts in turn]."""
    num_parts, shape = len(experts[0]), experts[0][0].shape

    def load(tensor: Tensor) -> None:
        for parts, values in zip(experts, tensor, strict=True):
            for index, part in enumerate(parts):
                part.load(values[..., index::num_parts].t().contiguous())

    return WeightSlot((len(experts), *shape[:0:-1], num_parts * shape[0]), load)


FAMILY = Family(ARCHITECTURE, "gpt_oss", read_config, WEIGHT_NAMES, own_slots=own_slots, unpacked=Mxfp4Checkpoint)
