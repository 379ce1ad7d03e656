"""assemble: an EngineConfig -> everything an LLM holds, wired together.

Checkpoint -> runtime (torch side) -> scheduler and EngineCore (host side), and the RequestBuilder that knows their
sizes. The only place where the two sides meet; torch is imported here, when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pagedllm.config import EngineConfig
from pagedllm.engine.core import EngineCore
from pagedllm.fingerprint import NUMERICS_VERSION
from pagedllm.generation_defaults import GenerationDefaults, eos_token_ids
from pagedllm.notices import LOGGER, Notices
from pagedllm.request_builder import RequestBuilder

if TYPE_CHECKING:
    from pagedllm.runtime.startup import Runtime
    from pagedllm.tokenizer import Tokenizer


class Closeable(Protocol):
    def close(self) -> None: ...


@dataclass(slots=True)
class Assembly:
    engine: EngineCore
    runtime: Closeable  # owns the weights and the KV cache
    builder: RequestBuilder
    defaults: GenerationDefaults
    notices: Notices
    seed: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    numerics: Mapping[str, str]  # what decides how results are rounded: dtype, kernel set, their version
    located: EngineConfig  # the config with local paths in place of Hugging Face ids
    info: Mapping[str, Any] = field(default_factory=dict)  # what LLM.info tells


def assemble(config: EngineConfig) -> Assembly:
    """Loads the model. Raises ValueError, NotSupportedError, ModelError, NotEnoughMemoryError, LibraryError."""
    from pagedllm.model.hub import locate
    from pagedllm.model.loader import open_checkpoint
    from pagedllm.runtime.compute_device import wants_cuda
    from pagedllm.runtime.footprint import check_footprint
    from pagedllm.runtime.resolve import resolve_dtype
    from pagedllm.runtime.startup import start

    begin = time.perf_counter()
    dtype = resolve_dtype(config.dtype, config.kernels, wants_cuda(config.device))
    located = locate(config)
    # a GPU's memory is looked at when its kernels are there
    check = None if wants_cuda(config.device) else partial(check_footprint, config, dtype)
    checkpoint = open_checkpoint(located.model, config.load_format, config.gguf_file, dtype, check=check)
    opened = time.perf_counter() - begin  # with a GGUF file's conversion, where that is made now
    with ThreadPoolExecutor(1) as thread:  # 0.2 s, beside the packing of the weights
        loading = thread.submit(_load_tokenizer, located.tokenizer or checkpoint.path)
        runtime = start(config, checkpoint)
    try:
        tokenizer, seconds = loading.result()
        assembly = _wire(config, located, checkpoint.generation_config, tokenizer, runtime)
    except BaseException:
        runtime.close()
        raise
    phases = {"files": opened, **runtime.seconds, "tokenizer": seconds}
    told = ", ".join(f"{name} {took:.2f}" for name, took in phases.items())
    LOGGER.info("ready after %.2f s: %s", time.perf_counter() - begin, told)
    return assembly


def _load_tokenizer(place: str | Path) -> tuple[Tokenizer, float]:
    """With the seconds it took, most of them beside the weights."""
    from pagedllm.tokenizer import Tokenizer

    begin = time.perf_counter()
    return Tokenizer.from_folder(place), time.perf_counter() - begin


def _wire(
    config: EngineConfig,
    located: EngineConfig,
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    runtime: Runtime,
) -> Assembly:
    from pagedllm.cache.kv_cache_manager import KVCacheManager
    from pagedllm.engine.policy import make_policy
    from pagedllm.engine.scheduler import Scheduler

    notices = Notices()
    if config.chat_template is not None:
        tokenizer.check_chat_template(config.chat_template)
    if config.generation_config == "none":
        generation_config = {}
    model, max_model_len = runtime.model_config, runtime.pool.max_model_len
    eos_ids = eos_token_ids(
        list(model.eos_token_ids), generation_config.get("eos_token_id"), list(tokenizer.eos_token_ids)
    )
    if not eos_ids:
        notices.tell(f"{config.model} names no eos token: outputs end by max_tokens or stop only")
    kv_cache = KVCacheManager(
        runtime.pool.num_blocks,
        config.block_size,
        windows=model.kv_windows,
        max_num_new_tokens=runtime.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        kv_cache,
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=make_policy(config.scheduling_policy),
    )
    builder = RequestBuilder(
        tokenizer,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        max_model_len=max_model_len,
        max_logprobs=config.max_logprobs,
        eos_token_ids=eos_ids,
        rope_variant=runtime.rope_variant,
        chat_template=config.chat_template,
        notices=notices,
        scores_prompts=runtime.runner.scorer is not None,
    )
    return Assembly(
        engine=EngineCore(
            scheduler,
            runtime.runner.execute,
            tokenizer.detokenizer,
            runtime.runner.launch if runtime.overlaps_steps else None,
        ),
        runtime=runtime,
        builder=builder,
        defaults=GenerationDefaults.from_config(generation_config),
        notices=notices,
        seed=config.seed,
        max_num_seqs=runtime.max_num_seqs,
        num_blocks=runtime.pool.num_blocks,
        block_size=config.block_size,
        bytes_per_block=runtime.pool.bytes_per_block,
        numerics=_numerics(runtime),
        located=located,
        info=_info(config, runtime),
    )


def _numerics(runtime: Runtime) -> dict[str, str]:
    numerics = {
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "kernels": runtime.kernels.name,
        "numerics": NUMERICS_VERSION,
    }
    return numerics if runtime.model_impl == "pagedllm" else {**numerics, "model_impl": runtime.model_impl}


def _info(config: EngineConfig, runtime: Runtime) -> dict[str, Any]:
    return {
        "model": config.model,
        "device": runtime.device_name,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "kernels": runtime.kernels.name,
        "model_impl": runtime.model_impl,
        "deterministic": runtime.is_deterministic,
        "async_scheduling": runtime.overlaps_steps,
        "num_threads": runtime.num_threads,
        "max_model_len": runtime.pool.max_model_len,
        "max_num_seqs": runtime.max_num_seqs,
        "max_num_batched_tokens": runtime.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "block_size": runtime.block_size,
        "num_blocks": runtime.pool.num_blocks,
        "kv_cache_bytes": runtime.pool.num_bytes,
        "kv_windows": list(runtime.model_config.kv_windows),
        "kv_bytes_of_longest_text": runtime.text_memory.num_bytes,
        "kv_bytes_without_windows": runtime.text_memory.num_bytes_without_windows,
    }
