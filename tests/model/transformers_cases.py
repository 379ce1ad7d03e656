"""Tiny models of architectures that pagedllm has no family for, and of some that it has, for transformers to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tiny import SIZES, VOCAB_SIZE, save_tokenizer

WINDOW = {"sliding_window": 24}
SHORT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
WITHOUT_FAMILY: dict[str, Callable[[Any], Any]] = {  # of the module `transformers`
    "Starcoder2ForCausalLM": lambda t: t.Starcoder2Config(**{**SIZES, **WINDOW, "tie_word_embeddings": True}),
    "Glm4ForCausalLM": lambda t: t.Glm4Config(**SIZES),
    "Exaone4ForCausalLM": lambda t: t.Exaone4Config(
        **{**SIZES, **WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4}
    ),
    "NemotronForCausalLM": lambda t: t.NemotronConfig(**SIZES),
}
WITH_FAMILY: dict[str, Callable[[Any], Any]] = {
    "Gemma2ForCausalLM": lambda t: t.Gemma2Config(**{**SIZES, **WINDOW, "query_pre_attn_scalar": 32}),  # softcaps
    "GptOssForCausalLM": lambda t: t.GptOssConfig(  # sinks
        **{**SIZES, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "recurrent": (lambda t: t.MambaConfig(**SHORT, hidden_size=32, num_hidden_layers=1), "it has recurrent layers"),
    "alibi": (
        lambda t: t.BloomConfig(**SHORT, hidden_size=64, n_layer=1, n_head=2),
        "it has attention that cannot be replaced",
    ),
    "convolutions": (
        lambda t: t.Lfm2Config(**{**SIZES, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]),
        "it has layers of kind 'conv'",
    ),
    "chunks": (
        lambda t: t.Llama4TextConfig(
            **{**SIZES, "num_hidden_layers": 1}, num_local_experts=2, intermediate_size_mlp=32
        ),
        "it has layers of kind 'chunked_attention'",
    ),
    "latent attention": (
        lambda t: t.DeepseekV3Config(
            **{**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 16},
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        ),
        "it has keys of size 32 and values of size 16",
    ),
    "dynamic rope": (
        lambda t: t.ArceeConfig(
            **{**SIZES, "num_hidden_layers": 1},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "it has a rope of kind 'dynamic', which changes with the longest text of a batch",
    ),
}  # fmt: skip


def save_model(folder: Path, make_config: Callable[[Any], Any]) -> Any:
    """Random weights; returns transformers' own model."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(make_config(transformers)).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
