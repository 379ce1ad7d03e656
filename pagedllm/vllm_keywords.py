"""Keywords of vLLM that LLM and SamplingParams do not have: harmless, or known and not here, with the way out.

docs/from_vllm.md lists them beside those that are the same; a test walks it. A harmless keyword is accepted with one
notice, as long as its value asks for nothing that is not here anyway. Used by `keywords.checks_keywords`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """reason: why a value means nothing here. way_out: for a value that `is_harmless` does not accept."""

    reason: str = ""
    way_out: str = ""
    is_harmless: Callable[[Any], bool] = lambda value: False


def _any(reason: str) -> Foreign:
    return Foreign(reason, is_harmless=lambda value: True)


def _only(accepted: Any, reason: str, way_out: str) -> Foreign:
    return Foreign(reason, way_out, lambda value: value == accepted and type(value) is type(accepted))


def _later(way_out: str) -> Foreign:
    return Foreign(way_out=way_out, is_harmless=lambda value: value is None)


ONE_DEVICE = "one LLM uses one device"
FOREIGN_LLM_KEYWORDS: Mapping[str, Foreign] = {
    "tensor_parallel_size": _only(1, ONE_DEVICE, "start one LLM per device and split the prompts"),
    "pipeline_parallel_size": _only(1, ONE_DEVICE, "start one LLM per device and split the prompts"),
    "data_parallel_size": _only(1, ONE_DEVICE, "start one LLM per device and split the prompts"),
    "distributed_executor_backend": _any("there are no worker processes"),
    "disable_custom_all_reduce": _any(ONE_DEVICE),
    "trust_remote_code": _any("no code from the model folder is run"),
    "swap_space": _any("preempted requests are computed again, nothing is swapped"),
    "disable_log_stats": _any("nothing is logged while a call runs"),
    "enable_chunked_prefill": _only(True, "long prompts are always cut into steps", "leave it out: it is always on"),
    "compilation_config": _any("nothing is compiled at run time"),
    "max_seq_len_to_capture": _any("there is no such limit"),
    "disable_cascade_attn": _any("the attention kernels find shared prefixes through the block tables"),
    "tokenizer_mode": _only("auto", "it is the default", "leave it out: tokenizer.json is read"),
    "skip_tokenizer_init": _only(False, "it is the default", "pass prompt_token_ids and detokenize=False"),
    "cpu_offload_gb": _only(0, "nothing is offloaded", "choose a smaller model, or a GGUF file"),
    "kv_cache_dtype": _only("auto", "K and V have the model's dtype", "leave it 'auto'"),
    "quantization": _later("pass the model as a GGUF file"),
    "enable_lora": _only(False, "it is the default", "merge the adapter into the weights first"),
    "speculative_config": _later("leave it out: the outputs are the same without"),
    "enable_sleep_mode": _only(False, "it is the default", "call close() and make a new LLM"),
    "num_gpu_blocks_override": _later("pass kv_cache_memory_bytes"),
    "hf_overrides": _later("edit the config.json of a copy"),
    "rope_scaling": _later("edit the config.json of a copy"),
    "tokenizer_revision": _later("pass a local folder as tokenizer"),
    "download_dir": _later("pass a local folder as model"),
    "limit_mm_per_prompt": _later("text only: leave it out"),
    "mm_processor_kwargs": _later("text only: leave it out"),
    "runner": _only("generate", "it is all there is", "this engine generates text only"),
    "task": _only("generate", "it is all there is", "this engine generates text only"),
}
FOREIGN_SAMPLING_PARAMS: Mapping[str, Foreign] = {
    "output_kind": _later("leave it out: outputs are given when they are finished"),
    "truncate_prompt_tokens": _later("cut the prompt's token ids yourself"),
    "extra_args": _later("leave it out"),
    "flat_logprobs": _only(False, "it is the default", "use token_logprobs of the output"),
    "skip_clone": _any("SamplingParams are never edited"),
    "skip_reading_prefix_cache": _only(False, "it is the default", "pass LLM(enable_prefix_caching=False)"),
}
FOREIGN_BEAM_SEARCH_PARAMS: Mapping[str, Foreign] = {
    "temperature": _only(0.0, "beam search does not sample", "leave it out: beam search does not sample"),
    "include_stop_str_in_output": _only(False, "it is the default", "take it from the output's token_ids"),
}
