"""What GGUF's architectures call their tensors and settings, and how these differ from the Hugging Face checkpoint's.

To add one: a line in ARCHITECTURES, and a function for what its config.json says beyond sizes. Where a tensor was
rearranged by llama.cpp's converter, its Place says how to put it back. Called by gguf_config.py and gguf_tensors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedllm.errors import ModelError
from pagedllm.model.gguf_header import GGUFHeader
from pagedllm.model.gguf_keys import Keys

Order = Literal["", "halves", "kv_groups"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a layer belongs: a module's name behind the layer's, `{}` for each part of the first dimension.

    order: of its rows in the file. "halves": neighbours of a head are the two halves' in turn, as llama.cpp's rope
    wants them; "kv_groups": q of all heads, k, v, where the checkpoint has them by KV head.
    """

    module: str
    order: Order = ""
    offset: float = 0.0  # what the converter added
    is_transposed: bool = False  # of a matrix's last two dimensions
    is_parameter: bool = False  # named "module" and "module_bias", without ".weight"
    partner: str = ""  # a tensor whose columns alternate with this one's in the checkpoint


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    name: str
    layers: Mapping[str, Place | None]  # by the file's name; None: another one's partner
    config: Callable[[GGUFHeader, Keys, dict[str, Any]], dict[str, Any]]  # beside `common`: what else config.json says
    layer_prefix: str = "model.layers."
    models: Mapping[str, str] | None = None  # tensors outside layers, where they are not called as Llama's
    norm_offset: float = 0.0  # of the norm outside layers
    has_layer_norm: bool = False
    has_rope: bool = True
    has_longrope: bool = False
    is_yarn_truncated: bool = True  # which the header cannot say
    is_partly_rotated: bool = False


MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PLAIN = {
    "attn_norm": Place("input_layernorm"),
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_output": Place("self_attn.o_proj"),
    "ffn_norm": Place("post_attention_layernorm"),
    "ffn_gate": Place("mlp.gate_proj"),
    "ffn_up": Place("mlp.up_proj"),
    "ffn_down": Place("mlp.down_proj"),
}
PERMUTED = PLAIN | {"attn_q": Place("self_attn.q_proj", "halves"), "attn_k": Place("self_attn.k_proj", "halves")}
QK_NORM = {"attn_q_norm": Place("self_attn.q_norm"), "attn_k_norm": Place("self_attn.k_norm")}
POST_NORMS = {
    "post_attention_norm": Place("post_attention_layernorm"),
    "ffn_norm": Place("pre_feedforward_layernorm"),
    "post_ffw_norm": Place("post_feedforward_layernorm"),
}
EXPERTS = {
    "ffn_gate_inp": Place("mlp.gate"),
    "ffn_gate_exps": Place("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": Place("mlp.experts.{}.up_proj"),
    "ffn_down_exps": Place("mlp.experts.{}.down_proj"),
}


def offset_norms(places: Mapping[str, Place], offset: float) -> dict[str, Place]:
    return {
        name: Place(place.module, offset=offset) if name.endswith("norm") else place for name, place in places.items()
    }


def has(header: GGUFHeader, name: str) -> bool:
    return f"blk.0.{name}" in header.tensors


def attention_bias(header: GGUFHeader) -> bool:
    """Of q, k, v and the output together."""
    is_there = has(header, "attn_q.bias")
    if is_there != has(header, "attn_output.bias"):
        raise ModelError(f"{header.path}: biases on only some of the attention's projections are not supported")
    return is_there


def named(architecture: str, model_type: str, activation: str | None = "silu") -> dict[str, Any]:
    names = {"architectures": [architecture], "model_type": model_type}
    return names if activation is None else {**names, "hidden_act": activation}


def expert_counts(header: GGUFHeader, keys: Keys, prefix: str = "num_experts") -> dict[str, Any]:
    keys.require("expert_gating_func", (1, 0), "the router's weights are a softmax in this family")
    return {prefix: keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _llama(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    keys.require("attention.sliding_window", (0,), "the llama architecture has no window")
    if keys.get("expert_count", int, 0):
        if attention_bias(header):
            raise ModelError(f"{header.path}: biases in a mixture of experts of the llama architecture: not supported")
        own = {**named("MixtralForCausalLM", "mixtral"), "sliding_window": None}
        return own | expert_counts(header, keys, "num_local_experts")
    keys.left.discard(keys.prefix + "expert_used_count")  # means nothing without experts
    return {
        **named("LlamaForCausalLM", "llama"),
        "attention_bias": attention_bias(header),
        "mlp_bias": has(header, "ffn_up.bias"),
    }


def _smollm3(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("SmolLM3ForCausalLM", "smollm3"),
        "attention_bias": attention_bias(header),
        "mlp_bias": has(header, "ffn_up.bias"),
        "no_rope_layer_interval": 4,  # not in the header; llama.cpp has it so too
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen2(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**named("Qwen2ForCausalLM", "qwen2"), "use_sliding_window": False}


def _qwen3(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("Qwen3ForCausalLM", "qwen3"),
        "attention_bias": attention_bias(header),
        "use_sliding_window": False,
    }


def _qwen2_moe(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    size = keys.count("expert_feed_forward_length")
    return {
        **named("Qwen2MoeForCausalLM", "qwen2_moe"),
        **expert_counts(header, keys),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": has(header, "attn_q.bias"),
        "use_sliding_window": False,
    }


def _qwen3_moe(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("Qwen3MoeForCausalLM", "qwen3_moe"),
        **expert_counts(header, keys),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "attention_bias": attention_bias(header),
        "use_sliding_window": False,
    }


def _olmoe(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("OlmoeForCausalLM", "olmoe"),
        **expert_counts(header, keys),
        "norm_topk_prob": False,
        "attention_bias": attention_bias(header),
        "clip_qkv": keys.real("attention.clamp_kqv") if keys.has("attention.clamp_kqv") else None,
    }


def _olmo2(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    keys.require("attention.sliding_window", (0,), "OLMo 3 is not supported")
    return {**named("Olmo2ForCausalLM", "olmo2"), "attention_bias": attention_bias(header)}


GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GEMMA3_PERIOD = 6  # the last of each six layers sees everything


def _gemma2(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("Gemma2ForCausalLM", "gemma2", None),
        **_gemma(keys, config, GEMMA2_27B_LAYERS, "attn_logit_softcapping"),
        "sliding_window": keys.count("attention.sliding_window"),
    }


def _gemma(keys: Keys, config: dict[str, Any], layers_of_27b: int, *softcaps: str) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scale_dim = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale_dim,  # not in the header; llama.cpp tells the 27B by its layers, and so do we
        "attn_logit_softcapping": None,
        **{key: keys.real(key) if keys.has(key) else None for key in ("final_logit_softcapping", *softcaps)},
    }


def _gemma3(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    period = keys.count("attention.sliding_window_pattern", GEMMA3_PERIOD)
    layers = range(config["num_hidden_layers"])
    is_window = [window is not None and layer % period < period - 1 for layer in layers]
    return {
        **named("Gemma3ForCausalLM", "gemma3_text", None),
        **_gemma(keys, config, GEMMA3_27B_LAYERS),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in is_window],
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
    }


def _phi3(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window", int, 0)
    return {**named("Phi3ForCausalLM", "phi3"), "sliding_window": window or None}


def _granite(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("GraniteForCausalLM", "granite"),
        "attention_bias": attention_bias(header),
        "mlp_bias": has(header, "ffn_up.bias"),
        "attention_multiplier": keys.real("attention.scale", 1.0),
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }


def _command_r(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("CohereForCausalLM", "cohere"),
        "attention_bias": attention_bias(header),
        "logit_scale": keys.real("logit_scale"),
        "use_qk_norm": has(header, "attn_q_norm.weight"),
    }


def _cohere2(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("Cohere2ForCausalLM", "cohere2"),
        "attention_bias": attention_bias(header),
        "logit_scale": keys.real("logit_scale"),
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": 4,  # not in the header; llama.cpp has it so too
    }


def _stablelm(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **named("StableLmForCausalLM", "stablelm"),
        "use_parallel_residual": keys.get("use_parallel_residual", bool, False),
        "use_qkv_bias": has(header, "attn_q.bias"),
        "qk_layernorm": has(header, "attn_q_norm.weight"),
    }


def _gpt_neox(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    del config["num_key_value_heads"], config["head_dim"]
    return {
        **named("GPTNeoXForCausalLM", "gpt_neox", "gelu"),
        "use_parallel_residual": keys.get("use_parallel_residual", bool, True),
        "attention_bias": has(header, "attn_qkv.bias"),
        "rotary_emb_base": config.pop("rope_theta"),
        "rotary_pct": config.pop("partial_rotary_factor", 1.0),
    }


def _gpt2(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    del config["num_key_value_heads"], config["head_dim"]
    return {
        **named("GPT2LMHeadModel", "gpt2", None),
        "activation_function": "gelu_new",
        "n_embd": config.pop("hidden_size"),
        "n_inner": config.pop("intermediate_size"),
        "n_layer": config.pop("num_hidden_layers"),
        "n_head": config.pop("num_attention_heads"),
        "n_positions": config.pop("max_position_embeddings"),
        "layer_norm_epsilon": config.pop("layer_norm_eps"),
    }


def _falcon(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    num_kv_heads = config.pop("num_key_value_heads")
    del config["head_dim"]
    if num_kv_heads == config["num_attention_heads"]:
        raise ModelError(
            f"{header.path}: a Falcon with as many KV heads as heads: the file does not say whether it has a rope"
        )
    is_new = num_kv_heads > 1
    if has(header, "attn_norm_2.weight") and not is_new:
        raise ModelError(f"{header.path}: a Falcon with two norms and one KV head is not supported")
    return {
        **named("FalconForCausalLM", "falcon", None),
        "activation": "gelu",
        "ffn_hidden_size": config.pop("intermediate_size"),
        "layer_norm_epsilon": config.pop("layer_norm_eps"),
        "new_decoder_architecture": is_new,
        "num_kv_heads": num_kv_heads,
        "num_ln_in_parallel_attn": 2 if has(header, "attn_norm_2.weight") else 1,
        "multi_query": not is_new,
        "parallel_attn": True,
        "alibi": False,
        "bias": has(header, "attn_qkv.bias"),
    }


def _gpt_oss(header: GGUFHeader, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    keys.require("expert_gating_func", (1, 3, 0), "the router's weights are a softmax in this family")
    config["intermediate_size"] = keys.count("expert_feed_forward_length", config["intermediate_size"])
    return {
        **named("GptOssForCausalLM", "gpt_oss"),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "attention_bias": attention_bias(header),
        "sliding_window": keys.count("attention.sliding_window"),
    }


FALCON_NAMES = {
    "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
GPT2_NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip
NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate"),
    "ffn_gate_shexp": Place("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": Place("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": Place("mlp.shared_expert.down_proj"),
}
_MIXTRAL = {
    "ffn_gate_inp": Place("block_sparse_moe.gate"),
    "ffn_gate_exps": Place("block_sparse_moe.experts.{}.w1"),
    "ffn_up_exps": Place("block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": Place("block_sparse_moe.experts.{}.w2"),
}
_FUSED = {
    "attn_qkv": Place("self_attn.qkv_proj"),
    "ffn_up": Place("mlp.gate_up_proj"),
}
_HEAD_NORMS = {
    "attn_q_norm": Place("self_attn.q_layernorm.norms.{}"),
    "attn_k_norm": Place("self_attn.k_layernorm.norms.{}"),
}
_NEOX = {
    "attn_norm": Place("input_layernorm"),
    "attn_qkv": Place("attention.query_key_value", "kv_groups"),
    "attn_output": Place("attention.dense"),
    "ffn_norm": Place("post_attention_layernorm"),
    "ffn_up": Place("mlp.dense_h_to_4h"),
    "ffn_down": Place("mlp.dense_4h_to_h"),
}
_GPT2 = {
    "attn_norm": Place("ln_1"),
    "attn_qkv": Place("attn.c_attn", is_transposed=True),
    "attn_output": Place("attn.c_proj", is_transposed=True),
    "ffn_norm": Place("ln_2"),
    "ffn_up": Place("mlp.c_fc", is_transposed=True),
    "ffn_down": Place("mlp.c_proj", is_transposed=True),
}
_FALCON = {
    "attn_norm": Place("input_layernorm"),
    "attn_qkv": Place("self_attention.query_key_value", "kv_groups"),
    "attn_output": Place("self_attention.dense"),
    "ffn_up": Place("mlp.dense_h_to_4h"),
    "ffn_down": Place("mlp.dense_4h_to_h"),
}
# In files of two norms `attn_norm` is the MLP's.
FALCON_TWO_NORMS = _FALCON | {"attn_norm": Place("ln_mlp"), "attn_norm_2": Place("ln_attn")}
_GPT_OSS = PLAIN | {
    "post_attention_norm": Place("post_attention_layernorm"),
    "attn_sinks": Place("self_attn.sinks", is_parameter=True),
    "ffn_gate_inp": Place("mlp.router"),
    "ffn_gate_exps": Place("mlp.experts.gate_up_proj", is_transposed=True, is_parameter=True, partner="ffn_up_exps"),
    "ffn_up_exps": None,
    "ffn_down_exps": Place("mlp.experts.down_proj", is_transposed=True, is_parameter=True),
}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GGUFArchitecture("llama", PERMUTED | _MIXTRAL, _llama),
        GGUFArchitecture("smollm3", PERMUTED, _smollm3),
        GGUFArchitecture("qwen2", PLAIN, _qwen2),
        GGUFArchitecture("qwen2moe", PLAIN | EXPERTS | _SHARED_EXPERT, _qwen2_moe),
        GGUFArchitecture("qwen3", PLAIN | QK_NORM, _qwen3),
        GGUFArchitecture("qwen3moe", PLAIN | QK_NORM | EXPERTS, _qwen3_moe),
        GGUFArchitecture("olmo2", PLAIN | QK_NORM | POST_NORMS, _olmo2),
        GGUFArchitecture("olmoe", PLAIN | QK_NORM | EXPERTS, _olmoe),
        GGUFArchitecture("gemma2", offset_norms(PLAIN | POST_NORMS, 1.0), _gemma2, norm_offset=1.0),
        GGUFArchitecture("gemma3", offset_norms(PLAIN | QK_NORM | POST_NORMS, 1.0), _gemma3, norm_offset=1.0),
        GGUFArchitecture("phi3", PLAIN | _FUSED, _phi3, has_longrope=True, is_partly_rotated=True),
        GGUFArchitecture("granite", PERMUTED, _granite),
        GGUFArchitecture("command-r", PLAIN | QK_NORM, _command_r, has_layer_norm=True),
        GGUFArchitecture("cohere2", PLAIN, _cohere2, has_layer_norm=True),
        GGUFArchitecture("stablelm", PLAIN | _HEAD_NORMS, _stablelm, has_layer_norm=True, is_partly_rotated=True),
        GGUFArchitecture(
            "gptneox", _NEOX, _gpt_neox, "gpt_neox.layers.", NEOX_NAMES, has_layer_norm=True, is_partly_rotated=True
        ),
        GGUFArchitecture("gpt2", _GPT2, _gpt2, "transformer.h.", GPT2_NAMES, has_layer_norm=True, has_rope=False),
        GGUFArchitecture("falcon", _FALCON, _falcon, "transformer.h.", FALCON_NAMES, has_layer_norm=True),
        GGUFArchitecture("gpt-oss", _GPT_OSS, _gpt_oss, is_yarn_truncated=False),
    )
}
