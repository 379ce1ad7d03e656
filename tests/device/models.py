"""Models with random weights: folders as transformers saves them, and one that exists in memory only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedllm.model.checkpoint import ALL_ROWS
from tests.device.sizes import Shape
from tests.tiny import save_tokenizer

NUM_RANDOM = 1 << 22  # values that all weights are cut from
SPREAD = 0.02


class RandomCheckpoint:
    """A Llama that was never written to a disk: 16 GB of it would take longer than what is measured."""

    def __init__(self, shape: Shape) -> None:
        self.path = Path(f"random-{shape.name}")
        self.config: Mapping[str, Any] = shape.hf_config()
        self.generation_config: Mapping[str, Any] = {}
        self._shapes = llama_tensors(shape)
        self._values = (torch.randn(NUM_RANDOM, generator=torch.Generator().manual_seed(0)) * SPREAD).bfloat16()

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Norms are ones; other tensors repeat the same values, from a place that differs with the rows."""
        shape = self._shapes[name]
        begin, end, _ = rows.indices(shape[0])
        wanted = (end - begin, *shape[1:])
        if len(shape) == 1:
            return torch.ones(wanted, dtype=torch.bfloat16)
        num_values, first = math.prod(wanted), (len(name) * 7919 + begin * 104_729) % (NUM_RANDOM // 2)
        pool = self._values[first:]
        if num_values > len(pool):
            pool = pool.repeat(-(-num_values // len(pool)))
        return pool[:num_values].clone().view(wanted)


def llama_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    tensors["model.norm.weight"] = (hidden,)
    if not shape.is_tied:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    return tensors


def save_random_llama(folder: Path, shape: Shape, device: torch.device) -> Path:
    """A folder as `save_pretrained` writes it, the weights drawn on `device`; with a tokenizer of few tokens, which
    prompts of token ids do not ask."""
    import transformers

    settings = {key: value for key, value in shape.hf_config().items() if key not in ("architectures", "dtype")}
    config = transformers.LlamaConfig(**settings)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def random_ids(num_prompts: int, lengths: tuple[int, ...], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts whose lengths go round `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size, (lengths[n % len(lengths)],), generator=generator).tolist()
        for n in range(num_prompts)
    ]


def as_prompts(token_ids: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in token_ids]
