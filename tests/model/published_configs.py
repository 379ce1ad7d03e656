"""config.json of published models: none may be refused for a setting that means nothing."""

from __future__ import annotations

from typing import Any

TRAINING = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}


def llama_like(architecture: str, model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int,
               vocabulary: int, length: int, **settings: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": length, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "transformers_version": "4.43.1", **TRAINING, **settings,
    }  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.3": llama_like(
        "MistralForCausalLM", "mistral", 4096, 14336, 32, 32, 8, 32768, 32768,
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": llama_like(
        "Qwen2ForCausalLM", "qwen2", 1536, 8960, 28, 12, 2, 151936, 131072,
        rms_norm_eps=1e-6, rope_theta=10000, max_window_layers=21, sliding_window=4096, use_mrope=False,
        use_sliding_window=False, tie_word_embeddings=False,
    ),
    "SmolLM3-3B": llama_like(
        "SmolLM3ForCausalLM", "smollm3", 2048, 11008, 36, 16, 4, 128256, 65536,
        rms_norm_eps=1e-6, rope_theta=5e6, rope_scaling=None, attention_bias=False, mlp_bias=False, pretraining_tp=2,
        layer_types=["full_attention"] * 36, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        max_window_layers=28, sliding_window=None, use_sliding_window=False, pad_token_id=128004,
    ),
    "gemma-2-2b-it": llama_like(
        "Gemma2ForCausalLM", "gemma2", 2304, 9216, 26, 8, 4, 256000, 8192,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attention_bias=False, head_dim=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid", pad_token_id=0,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096,
    ),
    "Phi-3-mini-128k": llama_like(
        "Phi3ForCausalLM", "phi3", 3072, 8192, 32, 32, 32, 32064, 131072,
        _name_or_path="Phi-3-mini-128k-instruct", attention_bias=False, auto_map={"AutoConfig": "x.Phi3Config"},
        embd_pdrop=0.0, resid_pdrop=0.0, original_max_position_embeddings=4096, pad_token_id=32000, rms_norm_eps=1e-5,
        rope_scaling={"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=False,
    ),
    "Phi-4-mini": llama_like(
        "Phi3ForCausalLM", "phi3", 3072, 8192, 32, 24, 8, 200064, 131072,
        attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0, full_attn_mod=1, interpolate_factor=1,
        lm_head_bias=False, mlp_bias=False, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
        rope_scaling={"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    ),
    "OLMo-2-1124-7B": llama_like(
        "Olmo2ForCausalLM", "olmo2", 4096, 11008, 32, 32, 32, 100352, 4096,
        attention_bias=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    "granite-3.1-2b": llama_like(
        "GraniteForCausalLM", "granite", 2048, 8192, 40, 32, 8, 49155, 131072,
        attention_bias=False, mlp_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
        logits_scaling=8.0, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=5e6,
        tie_word_embeddings=True, attention_dropout=0.1,
    ),
    "c4ai-command-r-v01": llama_like(
        "CohereForCausalLM", "cohere", 8192, 22528, 40, 64, 64, 256000, 8192,
        attention_bias=False, layer_norm_eps=1e-5, logit_scale=0.0625, model_max_length=131072, pad_token_id=0,
        rope_theta=8e6, use_qk_norm=False,
    ),
    "stablelm-2-12b": llama_like(
        "StableLmForCausalLM", "stablelm", 5120, 13824, 40, 32, 8, 100352, 4096,
        layer_norm_eps=1e-5, partial_rotary_factor=0.25, qk_layernorm=True, rope_theta=10000,
        tie_word_embeddings=False, use_parallel_residual=True, use_qkv_bias=False, hidden_dropout=0.0,
    ),
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "attention_probs_dropout_prob": 0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0,
        "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
        "vocab_size": 50432,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x.FalconConfig"}, "bias": False, "bos_token_id": 11,
        "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
    },
    "Mixtral-8x7B": llama_like(
        "MixtralForCausalLM", "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768,
        num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": llama_like(
        "Qwen3MoeForCausalLM", "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960,
        attention_bias=False, decoder_sparse_step=1, head_dim=128, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6, router_aux_loss_coef=0.001,
        sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "OLMoE-1B-7B": llama_like(
        "OlmoeForCausalLM", "olmoe", 2048, 1024, 16, 16, 16, 50304, 4096,
        attention_bias=False, clip_qkv=None, norm_topk_prob=False, num_experts=64, num_experts_per_tok=8,
        output_router_logits=False, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        router_aux_loss_coef=0.01, tie_word_embeddings=False,
    ),
    "gpt-oss-20b": llama_like(
        "GptOssForCausalLM", "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072,
        attention_bias=True, experts_per_token=4, head_dim=64, initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4, num_local_experts=32,
        output_router_logits=False,
        quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        rms_norm_eps=1e-5, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                      "rope_type": "yarn", "truncate": False},
        tie_word_embeddings=False,
    ),
}  # fmt: skip
