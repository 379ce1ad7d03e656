"""Settings that families spell alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedllm.model.config import LayerConfig, ModelConfig
from pagedllm.model.hf_config import REQUIRED, ConfigReader, Required
from pagedllm.ops.moe import MAX_CHOSEN_EXPERTS

LOCAL, GLOBAL = "sliding_attention", "full_attention"
MAX_LAYERS = 4096  # far above any model, and a list of them fits in memory


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float


def read_sizes(reader: ConfigReader, *, default_head_dim: int | None = None, eps_key: str = "rms_norm_eps") -> Sizes:
    """default_head_dim: None stands for hidden_size / num_attention_heads."""
    hidden_size = reader.integer("hidden_size")
    num_q_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_q_heads} heads")
    head_dim = reader.integer("head_dim", default_head_dim)
    if head_dim is None:
        head_dim = divided_head_dim(reader, "hidden_size", hidden_size, num_q_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even, got {head_dim}")
    return Sizes(
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        max_position=reader.integer("max_position_embeddings"),
        norm_eps=reader.number(eps_key),
    )


def read_bos(reader: ConfigReader) -> int | None:
    ids = reader.token_ids("bos_token_id")
    return ids[0] if ids else None


def divided_head_dim(reader: ConfigReader, key: str, hidden_size: int, num_q_heads: int) -> int:
    """key: the setting that says hidden_size."""
    if hidden_size % num_q_heads:
        raise reader.error(key, f"is {hidden_size}, which {num_q_heads} heads do not divide: set head_dim")
    return hidden_size // num_q_heads


def read_layer_types(reader: ConfigReader, num_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has a window: by layer_types, or by `default` of its index where the config is silent."""
    types = reader.texts("layer_types", num_layers, (LOCAL, GLOBAL))
    if types is None:
        return tuple(default(layer) for layer in range(num_layers))
    return tuple(layer_type == LOCAL for layer_type in types)


def read_window(reader: ConfigReader, is_windowed: tuple[bool, ...], default: int | None) -> int:
    """sliding_window, or `default` where the config does not name it; null only where no layer has a window."""
    window = reader.integer("sliding_window", None if reader.is_given("sliding_window") else default)
    if window is None and any(is_windowed):
        raise reader.error("sliding_window", f"is null, but there are layers of {LOCAL}")
    return window or 0


def usual_config(
    reader: ConfigReader,
    architecture: str,
    sizes: Sizes,
    layers: tuple[LayerConfig, ...],
    *,
    max_position: int,
    is_tied_default: bool = False,
    activation_key: str = "hidden_act",
    default_activation: str | Required = REQUIRED,
) -> ModelConfig:
    """What nearly all families spell alike; a family replaces what it has otherwise."""
    return ModelConfig(
        architecture=architecture,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        max_position=max_position,
        norm_eps=sizes.norm_eps,
        activation=reader.activation(activation_key, default_activation),
        layers=layers,
        attention_scale=sizes.head_dim**-0.5,
        is_tied=reader.boolean("tie_word_embeddings", is_tied_default),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=read_bos(reader),
    )


def refuse_unless(reader: ConfigReader, neutral: Mapping[str, object]) -> None:
    """Settings that may stand there with these values only."""
    for key, value in neutral.items():
        found = reader.take(key, value)
        if found != value:
            raise reader.error(key, f"is {found!r:.60}, only {value!r} is supported")


# Of experts that are stored one by one beside their router.
LOCAL_EXPERT_NAMES: Mapping[str, str] = {
    "layers.*.router": "model.layers.*.mlp.gate",
    "layers.*.experts.*.gate": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.experts.*.up": "model.layers.*.mlp.experts.*.up_proj",
    "layers.*.experts.*.down": "model.layers.*.mlp.experts.*.down_proj",
}


def read_num_experts(reader: ConfigReader) -> int:
    """num_experts, which transformers 5 writes as num_local_experts for some families."""
    old = reader.integer("num_experts", None)
    number = reader.integer("num_local_experts", old)
    if number is None:
        raise reader.error("num_experts", "is missing")
    if old not in (None, number):
        raise reader.error("num_local_experts", f"is {number}, but num_experts is {old}: remove one of them")
    return number


def read_experts_per_token(reader: ConfigReader, num_experts: int, default: int | None) -> int:
    number = reader.integer("num_experts_per_tok", default)
    if number is None:
        raise reader.error("num_experts_per_tok", "is missing")
    if number > num_experts:
        raise reader.error("num_experts_per_tok", f"is {number}, but there are {num_experts} experts")
    if number > MAX_CHOSEN_EXPERTS:
        raise reader.error("num_experts_per_tok", f"is {number}, at most {MAX_CHOSEN_EXPERTS} are supported")
    return number
