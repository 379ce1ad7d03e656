"""Sequences with blocks in common: attended together or apart, every token and logprob is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedllm import LLM, BeamSearchParams, SamplingParams
from tests.tiny import save_tiny_model

SHARED = [3 + i * i % 61 for i in range(600)]


def prompt(num_shared: int, *own: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [*SHARED[:num_shared], *own]}


PROMPTS = [prompt(600, 5, 6), prompt(600, 7), prompt(600, 8, 9, 10), prompt(300, 11), prompt(300, 12), prompt(70, 13)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, logprobs=0),
    *[SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=1) for n in (70, 20, 50, 40)],
]


def outputs_of(llm: LLM) -> list[Any]:
    beams = llm.beam_search(PROMPTS[2:4], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    found: list[Any] = [(o.token_ids, o.cumulative_logprob) for output in beams for o in output.outputs]
    for _ in range(2):
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
            found += [(o.token_ids, list(o.token_logprobs)) for o in output.outputs]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_together_or_apart_tokens_and_logprobs_are_equal(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = save_tiny_model(tmp_path, kind, max_position_embeddings=1024)
    found, most_together = [], []
    for is_together, enforce_eager in ((False, True), (True, True), (True, False)):
        with LLM(str(folder), dtype=dtype, kv_cache_memory_bytes=64 << 20, enforce_eager=enforce_eager) as llm:
            builder = llm._assembly.runtime.runner.metadata_builder
            assert builder.shares_prefixes
            builder.shares_prefixes = is_together
            backend, sizes = builder.backend, [0]
            original = backend.plan

            def plan(*args: Any, original: Any = original, sizes: list[int] = sizes, **named: Any) -> Any:
                result = original(*args, **named)
                sizes.append(int(result.work[1:, 6].max(initial=0)))
                return result

            backend.plan = plan  # type: ignore[method-assign]
            found.append(outputs_of(llm))
            most_together.append(max(sizes))
    assert most_together[0] == 1
    assert most_together[1] == most_together[2] >= 4
    assert found[0] == found[1] == found[2]
