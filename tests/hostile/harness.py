"""A tiny model for the cases of users, callables that make it say what a case needs, and the conservation check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pagedllm import LLM, RequestError, SamplingParams
from pagedllm.outputs import CompletionOutput, RequestOutputs
from pagedllm.request import Request
from pagedllm.request_builder import EncodedPrompt

Processor = Callable[[list[int], torch.Tensor], torch.Tensor]
MAX_MODEL_LEN = 128
BYTES_PER_TOKEN = 3 * 2 * 2 * 32 * 4  # layers x (K, V) x KV heads x head size x float32
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory_bytes": 8 << 20,
    "max_num_seqs": 16,
    "num_threads": 1,
}
STARVED = {"kv_cache_memory_bytes": MAX_MODEL_LEN * BYTES_PER_TOKEN}  # one request of full length
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Answer = tuple[Any, ...]


def open_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(folder, **{**SMALL, **fields})


def copied(folder: Path, target: Path, **generation_config: Any) -> Path:
    """The model with a generation_config.json of its own."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(generation_config))
    return target


def forcing(token_ids: Sequence[int]) -> Processor:
    """The model says exactly this, then token 5."""

    def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -50.0)
        forced[token_ids[len(output)] if len(output) < len(token_ids) else 5] = 50.0
        return forced

    return force


def fixed(values: Mapping[int, float], base: float = 0.0) -> Processor:
    """The same logits at every position."""

    def fix(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(base)
        for token_id, value in values.items():
            logits[token_id] = value
        return logits

    return fix


def completion(outputs: RequestOutputs, index: int = 0) -> CompletionOutput:
    return outputs[index].outputs[0]


def ids(outputs: RequestOutputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def answers(outputs: RequestOutputs) -> list[Answer]:
    """All that a user sees and that may depend on nothing but the request; floats by their bits."""
    return [
        (
            c.text,
            tuple(c.token_ids),
            c.finish_reason,
            c.stop_reason,
            len(o.prompt_token_ids),
            None if c.cumulative_logprob is None else c.cumulative_logprob.hex(),
            None if c.token_logprobs is None else c.token_logprobs.tobytes(),
            None if c.logprobs is None else repr(list(c.logprobs)),
        )
        for o in outputs
        for c in o.outputs
    ]


def solo(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Answer]:
    """Each request alone; seeds must be the requests' own."""
    return [
        answers(llm.generate([prompt], one, use_tqdm=False))[0] for prompt, one in zip(prompts, params, strict=True)
    ]


def errors(outputs: RequestOutputs) -> list[RequestError | None]:
    return [output.error for output in outputs]


def assert_nothing_left(llm: LLM) -> None:
    """No request, no block and no row is held: free + used == total with nothing used."""
    assembly = llm._assembly
    assert assembly is not None
    pool = assembly.engine.scheduler.kv_cache.pool
    assert not assembly.engine.has_unfinished_requests()
    assert (pool.num_free, pool.num_used) == (assembly.num_blocks, 0)


def make_request(llm: LLM, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> Request:
    """For EngineCore.add_request; params become the engine's own."""
    assert llm._assembly is not None
    return llm._assembly.builder.build(request_id, 0, EncodedPrompt(None, list(token_ids)), params, seed=0)
