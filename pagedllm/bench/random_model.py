"""`pagedllm bench random-model`: a checkpoint of random weights of a known shape, for benchmarks that read any model.

What a benchmark measures depends on a model's shape, not on what it says, so a shape stands in for a model that
nobody has at hand. transformers makes and writes it, in bfloat16; the tokenizer knows bytes. The same seed gives the
same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 32_000
SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B with a vocabulary of 32,000: 1.04 billion weights
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # Qwen3-30B-A3B in small, 8 experts of 64 a token: 0.47 billion weights, 0.13 of them for a token
    "qwen3-moe-small": {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def write_random_model(shape: str, folder: Path, seed: int = 0) -> None:
    """shape: one of SHAPES. Raises FileExistsError where `folder` holds a model already."""
    import torch
    import transformers

    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds a model already")
    settings = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None, **SHAPES[shape]}
    config = transformers.AutoConfig.for_model(**settings)
    models: Any = transformers.AutoModelForCausalLM  # has no types
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        model = models.from_config(config, dtype=torch.bfloat16)
        for weight in model.parameters():
            if weight.dim() > 1:  # norms stay 1
                weight.normal_(0, config.initializer_range, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Ids 0 - 255 are bytes, 256 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # has no types
    return make(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")
