"""From a GGUF header to what a checkpoint folder would say: config.json and generation_config.json.

Every key of the header is used, known to change nothing, or refused by name. What differs between architectures is in
gguf_architectures.py. Called by gguf.py; reads no tensor but the factors of a rope.
"""

from __future__ import annotations

from typing import Any

from pagedllm.errors import ModelError
from pagedllm.model.gguf_architectures import ARCHITECTURES, GGUFArchitecture
from pagedllm.model.gguf_header import GGUFHeader
from pagedllm.model.gguf_keys import Keys
from pagedllm.model.gguf_rope import ReadFactors, longrope_scaling, rope_scaling


def find_architecture(header: GGUFHeader) -> GGUFArchitecture:
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: GGUF architecture {name!r} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def hf_config(header: GGUFHeader, read_factors: ReadFactors) -> dict[str, Any]:
    """config.json as transformers' own converter's input had it. `read_factors` reads a tensor of the rope's."""
    architecture = find_architecture(header)
    if header.metadata.get("general.type", "model") != "model":
        raise ModelError(f"{header.path}: general.type is {header.metadata['general.type']!r}: not a model")
    if header.metadata.get("split.count", 1) != 1:
        raise ModelError(f"{header.path}: one part of a split GGUF: join the parts with `llama-gguf-split --merge`")
    keys = Keys(header, architecture.name)
    keys.left -= {"split.no", "split.count", "split.tensors.count"}
    config = _common(header, keys, architecture)
    config |= architecture.config(header, keys, config)
    if architecture.has_longrope:
        config["rope_scaling"] = longrope_scaling(header, keys, config, read_factors)
    elif architecture.has_rope:
        scaling = config["rope_scaling"] = rope_scaling(header, keys, config, read_factors)
        if scaling is not None and scaling["rope_type"] == "yarn" and not architecture.is_yarn_truncated:
            scaling["truncate"] = False
    keys.refuse_rest()
    return config


def _common(header: GGUFHeader, keys: Keys, architecture: GGUFArchitecture) -> dict[str, Any]:
    num_heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // num_heads or 1)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    values = {"attention.value_length": keys.count("attention.value_length", head_dim)}
    if not architecture.is_partly_rotated:
        values["rope.dimension_count"] = rotary_dim
    for key, value in values.items():
        if value != head_dim:
            raise ModelError(f"{keys.path}: {keys.prefix}{key} is {value}, not the head size {head_dim}: not supported")
    keys.require("attention.causal", (True,), "only causal models generate text")
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
        **({"partial_rotary_factor": rotary_dim / head_dim} if rotary_dim != head_dim else {}),
        **(
            {"layer_norm_eps": keys.real("attention.layer_norm_epsilon")}
            if architecture.has_layer_norm
            else {"rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon")}
        ),
        **({"rope_theta": keys.real("rope.freq_base", 10000.0)} if architecture.has_rope else {}),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


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
