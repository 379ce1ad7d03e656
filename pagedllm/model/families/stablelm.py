"""StableLM 2: LayerNorms, a quarter of each head rotated, attention and MLP one after the other or in parallel."""

from __future__ import annotations

from dataclasses import replace

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, refuse_unless, usual_config
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import PartialRotary, read_rope, stretched_length

ARCHITECTURE = "StableLmForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
    refuse_unless(reader, {"qk_layernorm": False})  # StableLM 2 12B: a LayerNorm of each head
    sizes = read_sizes(reader, eps_key="layer_norm_eps")
    rope = read_rope(
        reader,
        head_dim=sizes.head_dim,
        max_position=sizes.max_position,
        default_theta=10_000.0,
        partial=PartialRotary(default=0.25),
    )
    layers = (LayerConfig(AttentionKind(rope=rope)),) * sizes.num_layers
    is_parallel = reader.boolean("use_parallel_residual", False)
    return replace(
        usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position)),
        has_qkv_bias=reader.boolean("use_qkv_bias", False),
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel,
    )


FAMILY = Family(ARCHITECTURE, "stablelm", read_config, LLAMA_NAMES, (IGNORABLE_INV_FREQ,))
