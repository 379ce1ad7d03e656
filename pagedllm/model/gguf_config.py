"""From a GGUF header to what a checkpoint folder would say: config.json, generation_config.json, names of tensors.

Every key of the header is used, known to change nothing, or refused by name: a setting that we do not know could change
each token. Architectures: llama, qwen3, gemma3. Called by gguf.py; reads no tensor but rope_freqs.weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedllm.errors import ModelError
from pagedllm.model.gguf_header import GGUFHeader

# Keys that change nothing: descriptions, and hints for other programs. A trailing dot means all that begins so.
HARMLESS_KEYS = (
    "general.name", "general.type", "general.author", "general.version", "general.organization", "general.finetune",
    "general.basename", "general.description", "general.quantized_by", "general.size_label", "general.license",
    "general.license.", "general.url", "general.doi", "general.uuid", "general.repo_url", "general.source.",
    "general.base_model.", "general.dataset.", "general.datasets", "general.tags", "general.languages",
    "general.file_type", "general.quantization_version", "general.alignment", "general.architecture",
    "general.sampling.", "quantize.imatrix.", "tokenizer.",  # gguf_tokenizer.py accounts for these
)  # fmt: skip
HARMLESS_MODEL_KEYS = (
    "tensor_data_layout",  # of the file's history
    "rope.scaling.finetuned",  # a statement about training
    "expert_used_count",  # means nothing without experts, and those are refused
)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _LAYER_NAMES,
    "qwen3": _LAYER_NAMES | _QK_NORM_NAMES,
    "gemma3": _LAYER_NAMES
    | _QK_NORM_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FREQS = "rope_freqs.weight"
GEMMA3_27B_LAYERS = 62
GEMMA3_SWA_PERIOD = 6  # the last of each six layers sees everything
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODEL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def hf_tensor_names(header: GGUFHeader, architecture: str) -> dict[str, str]:
    """HF name to the file's name, in the file's order; a tensor without a known name is refused."""
    names: dict[str, str] = {}
    for name in header.tensors:
        if name == ROPE_FREQS:
            continue
        layer, model = _LAYER_TENSOR.fullmatch(name), _MODEL_TENSOR.fullmatch(name)
        if layer and layer[2] in LAYER_NAMES[architecture]:
            names[f"model.layers.{int(layer[1])}.{LAYER_NAMES[architecture][layer[2]]}.{layer[3]}"] = name
        elif model and model[1] in MODEL_NAMES:
            names[f"{MODEL_NAMES[model[1]]}.{model[2]}"] = name
        else:
            raise ModelError(f"{header.path}: tensor {name} is unknown for the architecture {architecture}")
    return names


class _Keys:
    """The keys of one architecture, each crossed off as it is read; `refuse_rest` names what is left."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.path = header.path
        self.prefix = f"{architecture}."
        self.metadata = header.metadata
        self.left = {key for key in header.metadata if not _is_harmless(key)}

    def has(self, key: str) -> bool:
        return self.prefix + key in self.metadata

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        full = self.prefix + key
        self.left.discard(full)
        value = self.metadata.get(full, default)
        if value is None:
            raise ModelError(f"{self.path}: the key {full} is missing")
        if isinstance(value, np.ndarray):  # per layer: taken where all layers agree
            if not value.size or (value != value[0]).any():
                raise ModelError(f"{self.path}: {full} differs between layers, which is not supported")
            value = value[0].item()
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ModelError(f"{self.path}: {full} has the wrong type: {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if not 0 < value < 1 << 31:
            raise ModelError(f"{self.path}: {self.prefix}{key} must be positive, got {value}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, (int, float), default))
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{self.path}: {self.prefix}{key} must be a positive number, got {value}")
        return value

    def require(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Some keys are accepted with the one value that asks for nothing."""
        self.left.discard(self.prefix + key)
        value = self.metadata.get(self.prefix + key, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise ModelError(f"{self.path}: {self.prefix}{key} = {value!r} is not supported: {why}")

    def refuse_rest(self) -> None:
        for key in HARMLESS_MODEL_KEYS:
            self.left.discard(self.prefix + key)
        if self.left:
            raise ModelError(f"{self.path}: unknown header keys: {', '.join(sorted(self.left))}")


def _is_harmless(key: str) -> bool:
    return any(key == known or (known.endswith(".") and key.startswith(known)) for known in HARMLESS_KEYS)


def hf_config(header: GGUFHeader, rope_freqs: Callable[[], NDArray[np.float32]]) -> dict[str, Any]:
    """config.json as transformers' own converter's input had it. `rope_freqs` reads the tensor of that name."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in LAYER_NAMES:
        known = ", ".join(LAYER_NAMES)
        raise ModelError(f"{header.path}: GGUF architecture {architecture!r} is not supported; supported are {known}")
    if header.metadata.get("general.type", "model") != "model":
        raise ModelError(f"{header.path}: general.type is {header.metadata['general.type']!r}: not a model")
    if header.metadata.get("split.count", 1) != 1:
        raise ModelError(f"{header.path}: one part of a split GGUF: join the parts with `llama-gguf-split --merge`")
    keys = _Keys(header, architecture)
    keys.left -= {"split.no", "split.count", "split.tensors.count"}
    config = _common(header, keys)
    config |= {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3}[architecture](header, keys, config)
    config["rope_scaling"] = _rope_scaling(keys, config, rope_freqs() if ROPE_FREQS in header.tensors else None)
    keys.refuse_rest()
    return config


def _common(header: GGUFHeader, keys: _Keys) -> dict[str, Any]:
    num_heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // num_heads or 1)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    for key, value in (("attention.value_length", keys.count("attention.value_length", head_dim)),
                       ("rope.dimension_count", rotary_dim)):  # fmt: skip
        if value != head_dim:
            raise ModelError(f"{keys.path}: {keys.prefix}{key} is {value}, not the head size {head_dim}: not supported")
    keys.require("expert_count", (0,), "mixtures of experts cannot be read from GGUF yet")
    keys.require("attention.causal", (True,), "only causal models generate text")
    keys.require("use_parallel_residual", (False,), "no supported family computes so")
    keys.require("pooling_type", (0,), "an embedding or ranking model does not generate text")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: the tensor token_embd.weight is missing or has no two dimensions")
    num_layers = keys.count("block_count")
    if num_layers > len(header.tensors):  # nothing of that size is allocated from here on
        raise ModelError(f"{header.path}: {keys.prefix}block_count is {num_layers:,}, the file has no such layers")
    vocab_size = embedding.shape[0]
    if keys.count("vocab_size", vocab_size) != vocab_size:
        raise ModelError(f"{header.path}: vocab_size is {keys.count('vocab_size')}, token_embd has {vocab_size} rows")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _llama(header: GGUFHeader, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    has = {name: f"blk.0.{name}.bias" in header.tensors for name in ("attn_q", "attn_output", "ffn_up")}
    if has["attn_q"] != has["attn_output"]:
        raise ModelError(f"{header.path}: biases on only some of the attention's projections are not supported")
    keys.require("attention.sliding_window", (0,), "the llama architecture has no window")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": has["attn_q"],
        "mlp_bias": has["ffn_up"],
    }


def _qwen3(header: GGUFHeader, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(header: GGUFHeader, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    period = keys.count("attention.sliding_window_pattern", GEMMA3_SWA_PERIOD)
    is_window = [window is not None and layer % period < period - 1 for layer in range(num_layers)]
    scale_dim = hidden // heads if num_layers == GEMMA3_27B_LAYERS else config["head_dim"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale_dim,  # not in the header; llama.cpp tells the 27B by its layers, and so do we
        "sliding_window": window,
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in is_window],
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping")
        if keys.has("final_logit_softcapping")
        else None,
        "attn_logit_softcapping": None,
    }


def _rope_scaling(keys: _Keys, config: dict[str, Any], freqs: NDArray[np.float32] | None) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", str, "none")
    legacy = keys.real("rope.scale_linear", 1.0)
    factor = keys.real("rope.scaling.factor", legacy)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.require(f"rope.scaling.{key}", (1.0,), "its effect on attention is not that of the model's own config")
    if kind in ("none", "linear"):
        keys.left.discard(keys.prefix + "rope.scaling.original_context_length")
        if freqs is not None:
            if factor != 1.0:
                raise ModelError(f"{keys.path}: both {ROPE_FREQS} and linear rope scaling: not supported")
            return llama3_scaling(freqs, config["rope_theta"], config["head_dim"], str(keys.path))
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or freqs is not None:
        raise ModelError(f"{keys.path}: {keys.prefix}rope.scaling.type = {kind!r} is not supported")
    scaling = {"rope_type": "yarn", "factor": factor,
               "original_max_position_embeddings": keys.count("rope.scaling.original_context_length")}  # fmt: skip
    for key in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = keys.real(f"rope.scaling.yarn_{key}")
    return scaling


def llama3_scaling(freqs: NDArray[np.float32], theta: float, head_dim: int, path: str) -> dict[str, Any] | None:
    """The parameters of llama3 scaling, from the divisors that the converter computed with them.

    With w the wavelength, divisors are 1 for w < original / high, `factor` for w > original / low, and between them
    1 / ((1 - s) / factor + s) with s = (original / w - low) / (high - low): linear in 1 / w. Only two ratios of
    (original, low, high) have an effect, so low = 1 is taken, as all published models have it.
    """
    divisors = freqs.astype(np.float64)
    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.min() < 1:
        raise ModelError(f"{path}: {ROPE_FREQS} must hold {head_dim // 2} numbers >= 1")
    factor = float(str(freqs.max()))
    if factor == 1.0:
        return None
    inverse_wavelength = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    is_between = (divisors > 1) & (divisors < divisors.max())
    smooth = (1 / divisors[is_between] - 1 / factor) / (1 - 1 / factor)
    if len(smooth) >= 2:
        x = inverse_wavelength[is_between]
        slope = (smooth[0] - smooth[-1]) / (x[0] - x[-1])  # original / (high - 1)
        span = 1 / max(slope * x[0] - smooth[0], 1e-9)  # high - 1, since slope * x - s = 1 / (high - 1)
        original, high = round(float(slope * span)), 1 + round(float(span), 3)
        s = np.clip((original * inverse_wavelength - 1) / max(high - 1, 1e-9), 0, 1)
        if original > 0 and np.allclose(1 / ((1 - s) / factor + s), divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError(f"{path}: {ROPE_FREQS} is not what llama3 scaling with low_freq_factor 1 gives: not supported")


def hf_generation_config(header: GGUFHeader, eos_token_ids: list[int]) -> dict[str, Any]:
    """Ids, and the sampling that newer files recommend."""
    config: dict[str, Any] = {"bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id")}
    config["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None
    for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            config[name] = value
    if len(config) > 2:
        config["do_sample"] = config.get("temperature", 1.0) > 0
    return config
