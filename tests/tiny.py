"""Tiny random checkpoints on disk, with a byte-level tokenizer: what end-to-end tests load.

Weights are random with a spread that makes greedy text vary; nothing they say makes sense.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
BOS, EOS, END = 0, 1, 2
SPECIAL_TOKENS = ("<s>", "</s>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "one two three four five six seven eight nine ten"] * 4
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
ORIGINAL_LENGTH = 100  # of the ropes that stretch
ROPES: dict[str, tuple[int, dict[str, Any]]] = {  # max_position_embeddings, rope parameters
    "linear": (ORIGINAL_LENGTH, {}),
    "dynamic": (ORIGINAL_LENGTH, {}),
    "yarn": (4 * ORIGINAL_LENGTH, {"original_max_position_embeddings": ORIGINAL_LENGTH}),
    "llama3": (
        4 * ORIGINAL_LENGTH,
        {"original_max_position_embeddings": ORIGINAL_LENGTH, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "longrope": (
        4 * ORIGINAL_LENGTH,
        {
            "original_max_position_embeddings": ORIGINAL_LENGTH,
            "short_factor": [1.0 + i / 32 for i in range(16)],
            "long_factor": [1.0 + i / 4 for i in range(16)],
        },
    ),
}


def transformers_config(kind: str) -> Any:
    """kind: "llama" (full attention), "qwen3" (q/k norm), "gemma3" (windows, two ropes, softcaps), "mistral" (a window
    on every layer), or one of ROPES.
    """
    import transformers

    if kind == "llama":
        return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    if kind == "qwen3":
        return transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)
    if kind == "mistral":
        return transformers.MistralConfig(**SIZES, sliding_window=24)
    if kind == "gemma3":
        return transformers.Gemma3TextConfig(
            **SIZES,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=32,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=15.0,
        )
    if kind in ROPES:
        max_position, parameters = ROPES[kind]
        sizes = {**SIZES, "max_position_embeddings": max_position}
        return transformers.LlamaConfig(
            **sizes, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}
        )
    raise ValueError(f"unknown kind {kind!r}")


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_tiny_model(
    folder: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """Writes config, weights, generation config and tokenizer into `folder`; returns it. changes: of the config."""
    import transformers

    config = transformers_config(kind)
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
