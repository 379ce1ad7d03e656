"""What a model is, as data: sizes and typed switches. The decoder reads nothing else.

Families translate a checkpoint's config.json or GGUF header into this; see `families/` and `registry.py`. Behaviour is
a switch here, never a test on a model's name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from pagedllm.ops.linear import Activation

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
NormKind = Literal["rms", "layer"]
QKNormKind = Literal["none", "head", "projection"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One way to rotate positions. Layers with equal RopeConfigs share a table."""

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # length the frequencies were trained for; 0: not used by this kind
    attention_factor: float | None = None  # None: computed from the others
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionKind:
    window: int = 0  # 0: every earlier key; else the last `window`, the token itself included
    rope: RopeConfig | None = None  # None: no rotation
    softcap: float = 0.0
    has_sinks: bool = False
    kv_group: int = 0  # whose block table its layer reads; layer_groups.py


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionKind
    is_sparse: bool = False  # a mixture of experts in the MLP's place


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Of all sparse layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of an expert
    is_normalized: bool  # the weights of a token's experts are made to add up to 1
    shared_intermediate_size: int = 0  # Qwen 2: of an expert that all tokens pass, times a sigmoid; 0: none
    has_router_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # the checkpoint's own word for it, for messages
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # the longest text, after the rope's scaling
    norm_eps: float
    activation: Activation
    layers: tuple[LayerConfig, ...]
    attention_scale: float  # multiplies q.k
    is_tied: bool  # the LM head is the embedding
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    is_embedding_scale_rounded: bool = False  # Gemma: to the compute type before it multiplies
    has_learned_positions: bool = False  # GPT-2: a vector a position, added to the embedding
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # attention's output projection
    has_mlp_bias: bool = False
    qk_norm: QKNormKind = "none"  # RMSNorm before rotation: of each head of q and k, or of all heads together
    has_gated_mlp: bool = True  # act(gate) * up, else act(up)
    moe: MoeConfig | None = None
    norm_kind: NormKind = "rms"  # of the residual stream
    has_norm_bias: bool = False  # of kind "layer" only
    norm_weight_offset: float = 0.0  # Gemma: 1, added to every norm weight when it is loaded
    has_pre_norms: bool = True  # OLMo 2: none before attention and the MLP
    has_post_norms: bool = False  # Gemma, OLMo 2: after attention and after the MLP, before the residual addition
    is_parallel: bool = False  # attention and MLP read the same residual stream; `layers` draws the orders
    has_mlp_norm: bool = True  # else (parallel only) the MLP reads what attention reads
    logit_scale: float = 1.0  # multiplies the logits
    logit_softcap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct ropes, in order of first use: one table each."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope))

    @property
    def num_kv_groups(self) -> int:
        return len(self.kv_windows)

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """Of each KV group: 0 where one of its layers sees all earlier keys, else the widest."""
        windows: dict[int, list[int]] = {}
        for layer in self.layers:
            windows.setdefault(layer.attention.kv_group, []).append(layer.attention.window)
        return tuple(max(windows[group]) if all(windows[group]) else 0 for group in range(len(windows)))

    @property
    def num_layers_per_block(self) -> int:
        """Of the largest KV group."""
        return max(Counter(layer.attention.kv_group for layer in self.layers).values())
