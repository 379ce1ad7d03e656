"""EngineConfig: what the user asked for, checked and frozen. `runtime.resolve` turns it into numbers.

Fields, names and defaults are those of `LLM(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SchedulingPolicy = Literal["fcfs", "priority", "offline"]
MAX_LOGPROBS_DEFAULT = 20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: str
    tokenizer: str | None = None
    dtype: Any = "auto"  # "auto", "bfloat16", "float32", "half", ..., or a torch.dtype
    device: str = "auto"
    kernels: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    scheduling_policy: SchedulingPolicy = "fcfs"
    deterministic: bool | None = None
    num_threads: int | None = None
    seed: int = 0
    generation_config: str = "auto"
    chat_template: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    gguf_file: str | None = None
    model_impl: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = MAX_LOGPROBS_DEFAULT
