"""StableLM 2: LayerNorms, a quarter of each head rotated, attention and MLP one after the other or in parallel.

The 12B norms each head of q and k, and stores a tensor for each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.families._common import read_sizes, usual_config
from pagedllm.model.family import IGNORABLE_INV_FREQ, LLAMA_NAMES, Family
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.hf_rope import PartialRotary, read_rope, stretched_length
from pagedllm.model.linear import WeightSlot

ARCHITECTURE = "StableLmForCausalLM"


def read_config(reader: ConfigReader) -> ModelConfig:
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
        qk_norm="layer_head" if reader.boolean("qk_layernorm", False) else "none",
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel,
    )


def own_slots(slots: dict[str, WeightSlot], config: ModelConfig) -> dict[str, WeightSlot]:
    """A tensor for each head's norm."""
    own: dict[str, WeightSlot] = {}
    if config.qk_norm != "layer_head":
        return own
    for layer in range(config.num_layers):
        for name in ("q", "k"):
            heads = slots.pop(f"layers.{layer}.{name}_norm.weight")
            for head in range(heads.shape[0]):
                tensor_name = f"model.layers.{layer}.self_attn.{name}_layernorm.norms.{head}.weight"
                own[tensor_name] = WeightSlot(heads.shape[1:], partial(_load_head, heads, head))
    return own


def _load_head(heads: WeightSlot, head: int, values: Tensor) -> None:
    assert heads.load_rows is not None
    heads.load_rows(head, values[None])


FAMILY = Family(ARCHITECTURE, "stablelm", read_config, LLAMA_NAMES, (IGNORABLE_INV_FREQ,), own_slots=own_slots)
