"""Many requests, little memory; two engines in turns: every answer exact, nothing left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.engine.core import EngineCore
from pagedllm.request_builder import EncodedPrompt
from tests.tiny import VOCAB_SIZE, save_tiny_model

NUM_REQUESTS = 1000
MAX_MODEL_LEN = 64
BYTES_PER_TOKEN = 3 * 2 * 2 * 32 * 4  # layers, K and V, heads, head size, bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def open_llm(folder: Path, num_full_requests: int) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=num_full_requests * MAX_MODEL_LEN * BYTES_PER_TOKEN,
        num_threads=1,
    )


def random_requests(seed: int, number: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(17)]
    prompts, params = [], []
    for i in range(number):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        prompts.append((shared if i % 3 == 0 else []) + own)
        temperature = 0.0 if i % 2 else 1.0
        params.append(SamplingParams(temperature=temperature, seed=i, max_tokens=rng.randint(1, 40), ignore_eos=True))
    return prompts, params


def engine_of(llm: LLM) -> EngineCore:
    return llm._open().engine


def test_a_thousand_requests_through_a_pool_of_three_are_exact_and_leak_nothing(folder: Path) -> None:
    prompts, params = random_requests(0, NUM_REQUESTS)
    with open_llm(folder, num_full_requests=100) as roomy:
        expected = [o.outputs[0].token_ids for o in roomy.generate(prompts, params, use_tqdm=False)]
    with open_llm(folder, num_full_requests=3) as starved:
        found = [o.outputs[0].token_ids for o in starved.generate(prompts, params, use_tqdm=False)]
        stats, pool = starved.stats, engine_of(starved).scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks == 3 * MAX_MODEL_LEN // 16
        assert not engine_of(starved).has_unfinished_requests()
        assert stats.num_preemptions > 0
        assert stats.peak_num_blocks <= pool.num_blocks
    assert found == expected


def test_two_engines_stepped_in_turns_do_not_meet(folder: Path) -> None:
    requests = [random_requests(seed, 12) for seed in (1, 2)]
    with open_llm(folder, 100) as llm:
        expected = [[o.outputs[0].token_ids for o in llm.generate(*r, use_tqdm=False)] for r in requests]
    with open_llm(folder, 3) as first, open_llm(folder, 3) as second:
        engines = [engine_of(first), engine_of(second)]
        found: list[dict[int, list[int]]] = [{}, {}]
        for llm, engine, (prompts, params) in zip((first, second), engines, requests, strict=True):
            for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                builder = llm._open().builder
                engine.add_request(builder.build(str(index), index, EncodedPrompt(None, prompt), p.clone(), seed=0))
        while any(engine.has_unfinished_requests() for engine in engines):
            for engine, answers in zip(engines, found, strict=True):
                for request in engine.step():
                    answers[request.prompt_index] = request.output_token_ids
    for answers, tokens in zip(found, expected, strict=True):
        assert [answers[i] for i in range(12)] == tokens
