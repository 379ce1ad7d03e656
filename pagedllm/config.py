"""EngineConfig: what the user asked for, checked and frozen. `runtime.resolve` turns it into numbers.

Fields, names and defaults are those of `LLM(...)`. What can be checked without a model or torch is checked here, each
error naming field and value; a known value that this version does not have is a NotSupportedError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from pagedllm.sampling_params import is_int, is_real

SchedulingPolicy = Literal["fcfs", "priority", "offline"]
MAX_LOGPROBS_DEFAULT = 20
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 128

CHOICES: dict[str, tuple[str, ...]] = {
    "scheduling_policy": ("offline", "fcfs", "priority"),
    "generation_config": ("auto", "none"),
    "load_format": ("auto", "safetensors", "gguf"),
    "model_impl": ("auto", "pagedllm", "transformers"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: str  # a folder, a GGUF file or a Hugging Face id
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
    async_scheduling: bool | None = None  # None: where there is a GPU to overlap with
    scheduling_policy: SchedulingPolicy = "offline"
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

    def __post_init__(self) -> None:
        self._verify_strings()
        self._verify_numbers()
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "a bool", getattr(self, name))
        for name in ("deterministic", "async_scheduling"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise _wrong(name, "None or a bool", getattr(self, name))
        if self.deterministic is False and self.device in ("auto", "cpu"):
            raise ValueError("deterministic=False is refused on a CPU, where equal tokens cost nothing: leave it None")
        if self.deterministic and self.kernels == "reference":
            raise ValueError(
                "deterministic=True is refused with kernels='reference': torch's products, which it uses, depend on "
                "the batch; leave it None, or take compiled kernels"
            )
        if not isinstance(self.revision, (str, type(None))) or self.revision == "":
            raise _wrong("revision", "None or a branch, tag or commit of a Hugging Face id", self.revision)

    def _verify_strings(self) -> None:
        for name in ("model", "tokenizer", "gguf_file"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif not (isinstance(value, str) and value) and not (value is None and name != "model"):
                raise _wrong(name, "a path", value)
        for name in ("device", "kernels"):
            if not isinstance(getattr(self, name), str):
                raise _wrong(name, "a str", getattr(self, name))
        if not isinstance(self.chat_template, (str, type(None))):
            raise _wrong("chat_template", "None or a template's text", self.chat_template)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise _wrong(name, "one of " + ", ".join(map(repr, choices)), value)

    def _verify_numbers(self) -> None:
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise _wrong(name, "None or an int >= 1", value)
        size = self.block_size
        if not is_int(size) or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise _wrong("block_size", f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}", size)
        share = self.gpu_memory_utilization
        if not is_real(share) or not 0 < share <= 1:
            raise _wrong("gpu_memory_utilization", "in (0, 1]", share)
        if not is_int(self.seed):
            raise _wrong("seed", "an int", self.seed)
        if not is_int(self.max_logprobs) or self.max_logprobs < 0:
            raise _wrong("max_logprobs", "an int >= 0", self.max_logprobs)


def _wrong(name: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {value!r}")
