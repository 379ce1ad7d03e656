"""What a model family is: a translation of its config and of its tensors' names. Behaviour lives in ModelConfig.

A family names each slot of the decoder (`Decoder.slots`) in its checkpoints' words. A slot is filled by one tensor;
`*` stands for the layer, `.weight` and `.bias` are carried over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedllm.model.config import ModelConfig
from pagedllm.model.hf_config import ConfigReader

# The names that Llama gave and most families kept.
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "final_norm": "model.norm",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.q": "model.layers.*.self_attn.q_proj",
    "layers.*.k": "model.layers.*.self_attn.k_proj",
    "layers.*.v": "model.layers.*.self_attn.v_proj",
    "layers.*.output": "model.layers.*.self_attn.o_proj",
    "layers.*.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.up": "model.layers.*.mlp.up_proj",
    "layers.*.down": "model.layers.*.mlp.down_proj",
}
QK_NORM_NAMES: Mapping[str, str] = {
    "layers.*.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.k_norm": "model.layers.*.self_attn.k_norm",
}
# Derived from the config; old checkpoints stored it.
IGNORABLE_INV_FREQ = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str  # as config.json's "architectures" spells it
    model_type: str
    read_config: Callable[[ConfigReader], ModelConfig]  # takes every setting that matters; the caller calls finish
    weight_names: Mapping[str, str]  # slot -> the checkpoint's name, both without .weight or .bias
    ignorable: tuple[str, ...] = ()  # regular expressions of whole names of tensors that may stand there unused

    def tensor_name(self, slot: str) -> str:
        """The checkpoint's name for a slot such as "layers.3.q.bias"."""
        module, _, kind = slot.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        if layer is None:
            return f"{self.weight_names[module]}.{kind}"
        name = self.weight_names[f"layers.*.{module[layer.end() :]}"]
        return f"{name.replace('*', layer[1])}.{kind}"

    def is_ignorable(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignorable)
