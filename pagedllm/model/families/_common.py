"""Settings that families spell alike."""

from __future__ import annotations

from dataclasses import dataclass

from pagedllm.model.hf_config import ConfigReader

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


def read_sizes(reader: ConfigReader, *, default_head_dim: int | None) -> Sizes:
    """default_head_dim: None stands for hidden_size / num_attention_heads."""
    hidden_size = reader.integer("hidden_size")
    num_q_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_q_heads} heads")
    head_dim = reader.integer("head_dim", default_head_dim)
    if head_dim is None:
        if hidden_size % num_q_heads:
            raise reader.error(
                "hidden_size", f"is {hidden_size}, which {num_q_heads} heads do not divide: set head_dim"
            )
        head_dim = hidden_size // num_q_heads
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
        norm_eps=reader.number("rms_norm_eps"),
    )


def read_bos(reader: ConfigReader) -> int | None:
    ids = reader.token_ids("bos_token_id")
    return ids[0] if ids else None
