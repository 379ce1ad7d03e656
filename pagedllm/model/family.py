"""What a model family is: a translation of its config and of its tensors' names. Behaviour lives in ModelConfig.

A family names each slot of the decoder (`Decoder.slots`) in its checkpoints' words; `*` stands for the layer and the
expert, `.weight` and `.bias` are carried over. Slots of one name (q, k and v; gate and up) are parts of one stored
tensor, in the decoder's order: one after the other, or by KV head:

    in order      q of all heads | k of all heads | v of all heads
    by KV head    q of its group | its k | its v  | q of the next group | ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pagedllm.model.checkpoint import Checkpoint
from pagedllm.model.config import ModelConfig
from pagedllm.model.hf_config import ConfigReader
from pagedllm.model.linear import WeightSlot

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
POST_NORM_NAMES: Mapping[str, str] = {
    "layers.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.post_mlp_norm": "model.layers.*.post_feedforward_layernorm",
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
    names_for: Callable[[ModelConfig], Mapping[str, str]] | None = None  # names that settings change
    optional_prefix: str = ""  # of names, missing from files that were saved without the head
    is_fused_by_kv_head: bool = False
    # Tensors that hold several slots or a part of one, by their names; takes those slots out of the dict
    own_slots: Callable[[dict[str, WeightSlot], ModelConfig], dict[str, WeightSlot]] | None = None
    # gpt-oss: the checkpoint with quantized tensors as numbers
    unpacked: Callable[[Checkpoint], Checkpoint] | None = None
    has_transposed_weights: bool = False  # GPT-2: of the layers' products, [in_features, out_features]

    def of_checkpoint(self, config: ModelConfig, tensor_names: Collection[str]) -> Family:
        """This family with the names that this checkpoint uses."""
        names = {**self.weight_names, **(self.names_for(config) if self.names_for else {})}
        prefix = self.optional_prefix
        if prefix and not any(name.startswith(prefix) for name in tensor_names):
            names = {slot: name.removeprefix(prefix) for slot, name in names.items()}
        return replace(self, weight_names=names)

    def tensor_name(self, slot: str) -> str:
        """The checkpoint's name for a slot such as "layers.3.q.bias"."""
        module, _, kind = slot.rpartition(".")
        name = self.weight_names[re.sub(r"\.\d+\.", ".*.", module)]
        for number in re.findall(r"\.(\d+)\.", module):
            name = name.replace("*", number, 1)
        return f"{name}.{kind}"

    def tensor_slots(self, slots: Mapping[str, WeightSlot], config: ModelConfig) -> dict[str, WeightSlot]:
        """What each stored tensor fills, by its name."""
        slots = dict(slots)
        own = self.own_slots(slots, config) if self.own_slots else {}
        parts: dict[str, list[WeightSlot]] = {}
        is_transposed: dict[str, bool] = {}
        for slot_name, slot in slots.items():
            name = self.tensor_name(slot_name)
            parts.setdefault(name, []).append(slot)
            is_transposed[name] = (
                self.has_transposed_weights and slot_name.startswith("layers.") and len(slot.shape) == 2
            )
        num_groups = config.num_kv_heads if self.is_fused_by_kv_head else 1
        joined = {name: joined_slot(slots, num_groups, is_transposed[name]) for name, slots in parts.items()}
        return joined | own

    def is_ignorable(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignorable)


def joined_slot(parts: Sequence[WeightSlot], num_groups: int, is_transposed: bool) -> WeightSlot:
    """One slot for a tensor that holds `parts` one after the other, in each of num_groups runs of rows."""
    if len(parts) == 1 and not is_transposed:
        return parts[0]
    num_rows = sum(part.shape[0] for part in parts)
    shape = (num_rows, *parts[0].shape[1:])
    sizes = [part.shape[0] // num_groups for part in parts]

    def load(tensor: Tensor) -> None:
        rows = tensor.t().contiguous() if is_transposed else tensor
        for part, values in zip(parts, rows.unflatten(0, (num_groups, -1)).split(sizes, 1), strict=True):
            part.load(values.reshape(part.shape))

    return WeightSlot(shape[::-1] if is_transposed else shape, load)
