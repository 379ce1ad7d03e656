"""Phi 3 and 4: q, k, v and gate, up stored as one tensor each; longrope, rotating a part of each head in Phi-4-mini."""

from __future__ import annotations

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, refuse_unless, usual_config
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import PartialRotary, read_rope, stretched_length

ARCHITECTURE = "Phi3ForCausalLM"
WEIGHT_NAMES = {
    **LLAMA_NAMES,
    "layers.*.q": "model.layers.*.self_attn.qkv_proj",
    "layers.*.k": "model.layers.*.self_attn.qkv_proj",
    "layers.*.v": "model.layers.*.self_attn.qkv_proj",
    "layers.*.gate": "model.layers.*.mlp.gate_up_proj",
    "layers.*.up": "model.layers.*.mlp.gate_up_proj",
}
# In files of the original code; transformers' own does not look at them.
NEUTRAL = {
    "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
}  # fmt: skip


def read_config(reader: ConfigReader) -> ModelConfig:
    refuse_unless(reader, NEUTRAL)
    sizes = read_sizes(reader)
    rope = read_rope(
        reader,
        head_dim=sizes.head_dim,
        max_position=sizes.max_position,
        default_theta=10_000.0,
        partial=PartialRotary(),
    )
    window = reader.integer("sliding_window", 0)
    layers = (LayerConfig(AttentionKind(window=window, rope=rope)),) * sizes.num_layers
    return usual_config(reader, ARCHITECTURE, sizes, layers, max_position=stretched_length(rope, sizes.max_position))


FAMILY = Family(ARCHITECTURE, "phi3", read_config, WEIGHT_NAMES, (IGNORABLE_INV_FREQ,))
