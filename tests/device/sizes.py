"""How large everything is: on a GPU, and in a rehearsal, which has to be through in half a minute of one core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama of that shape."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    max_position: int = 8192

    def hf_config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "initializer_range": 0.05,  # logits far enough apart that a choice can be clear in 16 bits
            "dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int
    matmul: int  # rows, columns and depth of the product that stands for the peak
    kv_bytes: int  # of the pool that decode attention reads
    kv_heads: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    groups: tuple[int, ...]  # query heads a KV head
    head_dims: tuple[int, ...]
    prefill_heads: tuple[int, int]  # of queries, of keys
    prefills: tuple[tuple[int, int, int], ...]  # (sequences, new tokens of each, keys of each, new ones included)
    num_warm_ups: int
    num_runs: int  # of which a figure is the median
    kinds: tuple[str, ...]  # of tiny models whose tokens are compared with the CPU's
    min_clear: int  # choices that have to be clear, so that comparing tokens means something
    small: Shape  # whose tokens are compared with the CPU's
    lengths: tuple[int, ...]  # of the prompts whose outputs are compared
    num_tokens: int  # of each of these outputs
    graph_batches: tuple[int, ...]  # sequences, each as many as a graph has places
    shapes: tuple[Shape, ...]  # whose decode steps are timed
    step_batches: tuple[int, ...]
    step_context: int
    step_budget: int  # new tokens of the largest step that there could be
    throughput: Shape
    running: int  # sequences, where gaps between steps are looked for
    num_idle_steps: int  # between which they are
    peer_prompts: tuple[int, int, int]  # (prompts, tokens of each, tokens of each output) beside transformers


SMOLLM2 = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49_152, True)
ONE_B = Shape("1B", 2048, 8192, 16, 32, 8, 64, 128_256, True)
EIGHT_B = Shape("8B", 4096, 14_336, 32, 32, 8, 128, 128_256, False)
TOY = Shape("toy", 64, 128, 1, 2, 1, 64, 640, True, 512)

ON_A_GPU = Sizes(
    copy_bytes=4 << 30,
    matmul=8192,
    kv_bytes=40 << 30,
    kv_heads=8,
    decode_batches=(64, 128, 256),
    decode_contexts=(1024, 4096, 16_384),
    groups=(1, 4, 8),
    head_dims=(64, 128),
    prefill_heads=(32, 8),
    prefills=((4, 2048, 2048), (1, 8192, 8192), (4, 2048, 8192)),
    num_warm_ups=2,
    num_runs=7,
    kinds=("llama", "qwen3", "gemma3"),  # plain; q/k norm; windows, two ropes, soft caps
    min_clear=10,
    small=SMOLLM2,
    lengths=(5, 40, 1, 23, 40, 64),
    num_tokens=32,
    graph_batches=(1, 2, 4, 8),
    shapes=(ONE_B, EIGHT_B),
    step_batches=(64, 128, 256),
    step_context=1024,
    step_budget=2048,
    throughput=ONE_B,
    running=256,
    num_idle_steps=64,
    peer_prompts=(64, 128, 128),
)
REHEARSED = Sizes(
    copy_bytes=1 << 20,
    matmul=64,
    kv_bytes=1 << 20,
    kv_heads=1,
    decode_batches=(2,),
    decode_contexts=(80,),
    groups=(1, 4),
    head_dims=(64,),
    prefill_heads=(2, 1),
    prefills=((1, 24, 40),),
    num_warm_ups=0,
    num_runs=1,
    kinds=("llama",),
    min_clear=1,
    small=TOY,
    lengths=(5, 1, 18),
    num_tokens=4,
    graph_batches=(1, 2),
    shapes=(TOY,),
    step_batches=(2,),
    step_context=24,
    step_budget=64,
    throughput=TOY,
    running=2,
    num_idle_steps=4,
    peer_prompts=(2, 8, 4),
)
