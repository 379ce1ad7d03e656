"""Tiny random models of the families that came after the first three: one entry for each switch of a family's config.

`CASES` is what the parity tests run and what docs/models.md lists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 97
TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **TOKENS,
    "hidden_size": 128,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
RMS = {**GROUPED, "rms_norm_eps": 1e-5}
LAYER = {**GROUPED, "layer_norm_eps": 1e-5}
GPT2 = {**TOKENS, "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 128}
FALCON = {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_hidden_size": 100}
FACTORS = [1.0 + 0.1 * i for i in range(16)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": FACTORS,
    "long_factor": [3 * factor for factor in FACTORS],
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 8.0,
}

QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 56}


@dataclass(frozen=True)
class Case:
    """A family's config with one choice of switches."""

    architecture: str
    sizes: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    embedding_scale: float = 1.0  # of the random embedding
    frozen_rope: int | None = None  # the length at which transformers' rope is fixed: what our requests' variant is


def _partial(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}}


WINDOW_8 = {"sliding_window": 8}
CASES: dict[str, Case] = {
    "mistral": Case("MistralForCausalLM", {**RMS, "head_dim": 48}, WINDOW_8),
    "mistral, no window": Case("MistralForCausalLM", RMS, {"sliding_window": None}),
    "ministral": Case(
        "MinistralForCausalLM",
        RMS,
        {**WINDOW_8, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 48},
    ),
    "qwen2": Case("Qwen2ForCausalLM", RMS),
    "qwen2, window": Case("Qwen2ForCausalLM", RMS, {**WINDOW_8, "use_sliding_window": True, "max_window_layers": 2}),
    "smollm3": Case("SmolLM3ForCausalLM", RMS),
    "smollm3, window and bias": Case(
        "SmolLM3ForCausalLM",
        RMS,
        {**WINDOW_8, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1], "attention_bias": True},
    ),
    "gemma2": Case("Gemma2ForCausalLM", {**RMS, "head_dim": 48}, WINDOW_8, embedding_scale=128**-0.5),
    "gemma2, low caps": Case(
        "Gemma2ForCausalLM",
        {**RMS, "head_dim": 32},
        {**WINDOW_8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
        embedding_scale=128**-0.5,
    ),
    "phi3": Case("Phi3ForCausalLM", RMS, WINDOW_8),
    "phi3, longrope within the original length": Case(
        "Phi3ForCausalLM", RMS, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100}, frozen_rope=84
    ),
    "phi3, longrope beyond the original length": Case(
        "Phi3ForCausalLM", RMS, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, frozen_rope=84
    ),
    "phi4-mini, longrope on half of each head": Case(
        "Phi3ForCausalLM",
        {**RMS, "hidden_size": 256},
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        frozen_rope=84,
    ),
    "olmo2": Case("Olmo2ForCausalLM", RMS),
    "olmo2, bias": Case("Olmo2ForCausalLM", RMS, {"attention_bias": True, "tie_word_embeddings": True}),
    "granite": Case("GraniteForCausalLM", RMS, GRANITE, embedding_scale=0.1),
    "granite, biases": Case("GraniteForCausalLM", RMS, {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "cohere": Case("CohereForCausalLM", LAYER, {"logit_scale": 0.25}),
    "cohere, bias": Case("CohereForCausalLM", LAYER, {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere, qk norm": Case("CohereForCausalLM", LAYER, {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": Case("Cohere2ForCausalLM", LAYER, {**WINDOW_8, "logit_scale": 0.25}),
    "stablelm": Case("StableLmForCausalLM", LAYER, _partial(0.25)),
    "stablelm, parallel": Case(
        "StableLmForCausalLM", LAYER, {**_partial(0.5), "use_parallel_residual": True, "use_qkv_bias": True}
    ),
    "stablelm, qk norm": Case("StableLmForCausalLM", LAYER, {**_partial(0.25), "qk_layernorm": True}),
    "gpt_neox": Case("GPTNeoXForCausalLM", {**SIZES, "layer_norm_eps": 1e-5}, _partial(0.25)),
    "gpt_neox, sequential": Case(
        "GPTNeoXForCausalLM",
        {**SIZES, "layer_norm_eps": 1e-5},
        {**_partial(1.0), "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "gpt_neox, the 20B's activation": Case(
        "GPTNeoXForCausalLM", {**SIZES, "layer_norm_eps": 1e-5}, {**_partial(0.25), "hidden_act": "gelu_fast"}
    ),
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "gpt2, unscaled and untied": Case(
        "GPT2LMHeadModel", GPT2, {"scale_attn_weights": False, "tie_word_embeddings": False, "n_inner": 72}
    ),
    "gpt2, scores by layer": Case("GPT2LMHeadModel", GPT2, {"scale_attn_by_inverse_layer_idx": True}),
    "falcon 7b": Case("FalconForCausalLM", FALCON),
    "falcon 40b": Case(
        "FalconForCausalLM", FALCON, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "falcon 11b": Case(
        "FalconForCausalLM",
        FALCON,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt_oss": Case("GptOssForCausalLM", {**RMS, "head_dim": 48}, GPT_OSS),
    "mixtral": Case("MixtralForCausalLM", RMS, {"num_local_experts": 5}),
    "mixtral, window": Case("MixtralForCausalLM", RMS, {**WINDOW_8, "num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen2_moe": Case("Qwen2MoeForCausalLM", RMS, QWEN2_MOE),
    "qwen2_moe, some layers dense": Case(
        "Qwen2MoeForCausalLM",
        RMS,
        {**QWEN2_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", {**RMS, "head_dim": 48}, {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_moe, some layers dense": Case(
        "Qwen3MoeForCausalLM",
        {**RMS, "head_dim": 32},
        {**QWEN_MOE, **WINDOW_8, "use_sliding_window": True, "mlp_only_layers": [0, 3], "attention_bias": True},
    ),
    "olmoe": Case("OlmoeForCausalLM", RMS, {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe, clipped": Case(
        "OlmoeForCausalLM",
        RMS,
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": 0.7},
    ),
    "falcon, sequential": Case(
        "FalconForCausalLM", FALCON, {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False}
    ),
}


def case_config(case: Case, **changes: Any) -> PreTrainedConfig:
    model_class = getattr(transformers, case.architecture)
    return model_class.config_class(**{**case.sizes, **case.settings, **changes}, architectures=[case.architecture])


def config_json(case: Case) -> dict[str, Any]:
    """config.json of a case, every default written out."""
    return dict(json.loads(case_config(case).to_json_string(use_diff=False)))


def build_case(case: Case, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model with eager attention; weights as in `models.build`: a forgotten part shows."""
    model_class = getattr(transformers, case.architecture)
    model = model_class._from_config(case_config(case, **changes), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    is_offset = case.architecture.startswith("Gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif name.endswith("sinks"):
                weight.copy_(noise)
            elif weight.ndim == 1 or name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.copy_(0.3 * noise + (0.0 if is_offset else 1.0))
            elif any(part in name for part in ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe")):
                weight.copy_(noise * case.embedding_scale)
            else:
                fan_in = weight.shape[-1] if case.architecture != "GPT2LMHeadModel" else weight.shape[-2]
                weight.copy_(1.5 * noise * fan_in**-0.5)
    return model
