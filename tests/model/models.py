"""Tiny random models, built by transformers and saved as a user would find them.

Weights are drawn so that logits spread, norms differ from 1 and biases from 0: a forgotten part shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB_SIZE = 97
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
}


def build(family: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A float32 model with eager attention. `settings` are the config's."""
    config_class, model_class, own = FAMILIES[family]
    config = config_class(**{**SIZES, **own, **settings})
    model = model_class._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(0.3 * noise + (0.0 if family == "gemma3" else 1.0))
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise * (weight.shape[1] ** -0.5 if family == "gemma3" else 1.0))
            else:
                weight.copy_(1.5 * noise * weight.shape[1] ** -0.5)
    return model


def save(model: PreTrainedModel, folder: Path, **changes: Any) -> Path:
    """`changes` are made to config.json; a value of None removes the setting."""
    model.save_pretrained(folder)
    if changes:
        edit_config(folder, **changes)
    return folder


def reload(family: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """As transformers loads it: weights in `dtype`, ropes in float32."""
    return FAMILIES[family][1].from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """transformers' logits of every position, [len(token_ids), V] float32: one forward pass, no cache."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def freeze_rope(model: PreTrainedModel, num_total_tokens: int) -> None:
    """Fixes transformers' rope to the variant that we choose for a request of that length.

    transformers chooses anew in every forward pass, from the length so far; keys in its cache keep the old rotation.
    """
    rotary = model.model.rotary_emb
    rotary(torch.zeros(1), torch.tensor([[num_total_tokens - 1]]))
    rotary.rope_type = "default"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_parity(model: PreTrainedModel, sequences: Any, *, num_prompt: int, num_tokens: int = 64) -> None:
    """Logits within 2e-4 in one pass and in chunks, and the same greedy tokens.

    Greedy tokens are compared in one pass of transformers over our own text: by induction both generate it.
    """
    prompt = random_ids(num_prompt)
    text = prompt + sequences.greedy(prompt, num_tokens)
    expected = logits_of(model, text)
    assert text[num_prompt:] == expected[num_prompt - 1 : -1].argmax(-1).tolist()
    for chunk in (None, 7):
        assert relative_error(sequences.logits(text, chunk=chunk), expected) < 2e-4
