"""A model of two layers with random weights, to see whether compiled kernels give the reference's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedllm.config import EngineConfig
from pagedllm.engine.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.model.checkpoint import ALL_ROWS
from pagedllm.runtime.startup import start
from pagedllm.sampling_params import SamplingParams

PROMPT = (1, 22, 33, 44, 55)
NUM_TOKENS = 3


class SelfTestCheckpoint:
    """A small Llama with random weights, the same everywhere."""

    hidden, intermediate, heads, kv_heads, head_dim, layers, vocab = 64, 96, 2, 1, 32, 2, 128

    def __init__(self) -> None:
        self.path = Path("self-test")
        self.generation_config: Mapping[str, Any] = {}
        self.config: Mapping[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self._shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            self._shapes |= {
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "self_attn.q_proj.weight": (width, self.hidden),
                prefix + "self_attn.k_proj.weight": (kv_width, self.hidden),
                prefix + "self_attn.v_proj.weight": (kv_width, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, width),
                prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(self.names().index(name))
        tensor = torch.randn(self._shapes[name], generator=generator, device="cpu", dtype=torch.float32)
        return (tensor.abs() if tensor.dim() == 1 else tensor * 0.3)[rows]


def generate_tokens(kernels: str, dtype: str) -> list[int]:
    """NUM_TOKENS greedy tokens after PROMPT, by the kernels of that name."""
    config = EngineConfig(
        model="self-test",
        device="cpu",  # also where a GPU is: its kernels have no such small heads
        kernels=kernels,
        dtype=dtype,
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=1,
        max_num_batched_tokens=len(PROMPT),
    )
    runtime = start(config, SelfTestCheckpoint())
    try:
        new = NewRequestData(len(PROMPT), SamplingParams(temperature=0), seed=0)
        request = ScheduledRequest("self-test", 0, len(PROMPT), PROMPT, (), ((0,),), len(PROMPT) - 1, new_request=new)
        tokens: list[int] = []
        while True:
            result = runtime.runner.execute(SchedulerOutput((request,), num_tokens=request.num_new_tokens))
            tokens.extend(result.sampled_token_ids[0])
            if len(tokens) == NUM_TOKENS:
                return tokens
            position = len(PROMPT) + len(tokens) - 1
            request = ScheduledRequest("self-test", position, 1, first_logits_index=position)
    finally:
        runtime.close()
