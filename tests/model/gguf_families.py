"""Tiny models of every family as GGUF files, written as llama.cpp's converter would.

Names are the `gguf` package's own table; what the converter rearranges is done here from its description: q and k of
Llama's kin for a rope of neighbours, fused q, k, v of Falcon and GPT-NeoX by kind, Gemma's norms plus one, GPT-2's
matrices transposed, experts stacked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.model.family_models import CASES, VOCAB_SIZE, build_case

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "FalconForCausalLM": gguf.MODEL_ARCH.FALCON,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
}
PERMUTED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3, gguf.MODEL_ARCH.GRANITE)
# Settings that a GGUF file cannot say: the converter drops them, and llama.cpp takes the usual value.
EVERY = {"tie_word_embeddings": False}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere, qk norm": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 48},
}
GGUF_CASES = (
    "mistral, no window", "qwen2", "smollm3", "gemma2", "phi3", "phi3, longrope beyond the original length",
    "phi4-mini, longrope on half of each head", "olmo2", "granite", "granite, biases", "cohere", "cohere, qk norm",
    "cohere2", "stablelm", "stablelm, parallel", "stablelm, qk norm", "gpt_neox", "gpt2", "falcon 7b", "falcon 40b",
    "falcon 11b", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "olmoe, clipped",
)  # fmt: skip


def write_case(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """The model, and its GGUF file."""
    case = CASES[name]
    changes = {**EVERY, **CHANGES.get(name, {})}
    if name == "olmoe, clipped":
        changes["norm_topk_prob"] = False  # as all published ones
    model = build_case(case, **changes)
    model.save_pretrained(folder)
    kind = ARCHITECTURES[case.architecture]
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[kind])
    _write_sizes(writer, model.config, kind)
    _write_tokens(writer)
    for tensor_name, tensor in _converted(load_file(folder / "model.safetensors"), model.config, kind).items():
        writer.add_tensor(tensor_name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, folder / "model.gguf"


def _write_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"token{index}" for index in range(3, VOCAB_SIZE))])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["a b"])


def _write_sizes(writer: gguf.GGUFWriter, config: Any, kind: gguf.MODEL_ARCH) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = {gguf.MODEL_ARCH.GPT2: "n_inner", gguf.MODEL_ARCH.FALCON: "ffn_hidden_size"}.get(kind, "intermediate_size")
    writer.add_feed_forward_length(getattr(config, inner) or 4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    is_multi_query = kind == gguf.MODEL_ARCH.FALCON and not config.new_decoder_architecture
    num_kv_heads = getattr(config, "num_kv_heads" if kind == gguf.MODEL_ARCH.FALCON else "num_key_value_heads", None)
    writer.add_head_count_kv(1 if is_multi_query else num_kv_heads or config.num_attention_heads)
    if "head_dim" in config.to_dict() and kind != gguf.MODEL_ARCH.FALCON:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        if kind != gguf.MODEL_ARCH.GPTNEOX:
            writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _write_switches(writer, config, kind)


def _write_switches(writer: gguf.GGUFWriter, config: Any, kind: gguf.MODEL_ARCH) -> None:
    if getattr(config, "sliding_window", None) and kind in (
        gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.COHERE2, gguf.MODEL_ARCH.GPT_OSS, gguf.MODEL_ARCH.PHI3,
    ):  # fmt: skip
        writer.add_sliding_window(config.sliding_window)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if kind in (gguf.MODEL_ARCH.STABLELM, gguf.MODEL_ARCH.GPTNEOX):
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind in (gguf.MODEL_ARCH.COMMAND_R, gguf.MODEL_ARCH.COHERE2):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == gguf.MODEL_ARCH.GRANITE:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == gguf.MODEL_ARCH.GPT_OSS:
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if kind == gguf.MODEL_ARCH.PHI3 and config.rope_parameters["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        attention_factor = (1 + torch.tensor(scale).log() / torch.tensor(original).log()).sqrt()
        writer.add_rope_scaling_attn_factors(float(attention_factor))


def _converted(state: dict[str, Tensor], config: Any, kind: gguf.MODEL_ARCH) -> dict[str, Tensor]:
    """Tensors by the file's names."""
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    file: dict[str, Tensor] = {}
    for name, tensor in _merged(state, kind).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        file[found] = _rearranged(found, tensor.float(), config, kind)
    if kind == gguf.MODEL_ARCH.PHI3 and config.rope_parameters["rope_type"] == "longrope":
        file["rope_factors_long.weight"] = torch.tensor(config.rope_parameters["long_factor"])
        file["rope_factors_short.weight"] = torch.tensor(config.rope_parameters["short_factor"])
    return file


def _merged(state: dict[str, Tensor], kind: gguf.MODEL_ARCH) -> dict[str, Tensor]:
    """One tensor for all experts of a layer, or for all heads' norms; gpt-oss's gate and up apart."""
    merged: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)", name)
        if kind == gguf.MODEL_ARCH.GPT_OSS and ".experts." in name:
            merged |= _gpt_oss_experts(name, tensor)
        elif kind == gguf.MODEL_ARCH.GPT_OSS and name.endswith("sinks"):
            merged[f"{name}.weight"] = tensor
        elif found:
            whole = (found[1].removesuffix(".norms") if "norms" in found[1] else found[1]) + found[3]
            parts.setdefault(whole, {})[int(found[2])] = tensor
        else:
            merged[name] = tensor
    return merged | {name: torch.stack([p[i] for i in range(len(p))]) for name, p in parts.items()}


def _gpt_oss_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    kind = "bias" if name.endswith("_bias") else "weight"
    base, _, last = name.removesuffix("_bias").rpartition(".")
    tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
    if last == "down_proj":
        return {f"{base}.down_proj.{kind}": tensor}
    return {f"{base}.gate_proj.{kind}": tensor[:, ::2], f"{base}.up_proj.{kind}": tensor[:, 1::2]}


def _rearranged(name: str, tensor: Tensor, config: Any, kind: gguf.MODEL_ARCH) -> Tensor:
    if kind in PERMUTED and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if kind == gguf.MODEL_ARCH.GEMMA2 and name.endswith("norm.weight"):
        return tensor + 1
    if kind == gguf.MODEL_ARCH.GPT2 and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name):
        return tensor.t()
    if ".attn_qkv." in name and kind in (gguf.MODEL_ARCH.FALCON, gguf.MODEL_ARCH.GPTNEOX):
        groups = config.num_attention_heads
        if kind == gguf.MODEL_ARCH.FALCON:
            groups = config.num_kv_heads if config.new_decoder_architecture else 1
        by_group = tensor.unflatten(0, (groups, config.num_attention_heads // groups + 2, -1))
        q, k, v = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)])
    return tensor
