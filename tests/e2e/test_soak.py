"""Soak: 2,000 requests with random parameters through random pools, with aborts and interrupts, against solo runs.

Twenty engines, a hundred requests each. Whatever comes of a round, nothing is left in the engine, what ended is what
its request gives alone, what was cut short is the beginning of it, and the same requests then run whole.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.runtime.model_runner import ModelRunner
from tests.hostile.harness import BYTES_PER_TOKEN, Answer, answers, assert_nothing_left, make_request, open_llm
from tests.tiny import VOCAB_SIZE, save_tiny_model

NUM_ROUNDS = 20
NUM_REQUESTS = 100  # a round
MAX_LEN = 112
ENDINGS = ("whole", "abort", "interrupt")


def wander(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[(7 * len(token_ids) + sum(token_ids)) % VOCAB_SIZE] += 4
    return logits


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 8, 20, 40]), "seed": rng.randrange(1000)}
    fields["temperature"] = rng.choice([0, 0, 0.7, 1.0, 1.5])
    fields["ignore_eos"] = rng.random() < 0.5
    for name, values in {
        "top_p": (0.5, 0.95),
        "top_k": (1, 5, 50),
        "min_p": (0.01, 0.3),
        "repetition_penalty": (0.8, 1.3),
        "presence_penalty": (-1.0, 0.5),
        "frequency_penalty": (-0.2, 0.4),
        "stop": ("e", ["th", "o", "xyz"]),
        "stop_token_ids": ([60, 61, 62, 63],),
        "include_stop_str_in_output": (True,),
        "logprobs": (0, 2, -1),
        "logit_bias": ({9: 3.0, 70: -100},),
        "bad_words": (["e"], ["the", "a b"]),
        "allowed_token_ids": (list(range(40, 200)),),
        "logits_processors": ([wander],),
    }.items():
        if rng.random() < 0.15:
            fields[name] = rng.choice(values)
    if rng.random() < 0.15:
        fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    return SamplingParams(**fields)


def random_prompts(rng: random.Random) -> list[list[int]]:
    starts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 16, 40]))] for _ in range(5)]
    return [
        rng.choice(starts) + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        for _ in range(NUM_REQUESTS)
    ]


def random_engine(rng: random.Random) -> dict[str, Any]:
    num_tokens = MAX_LEN * rng.choice([1, 1, 2, 5, 40])
    return {
        "max_model_len": MAX_LEN,
        "kv_cache_memory_bytes": num_tokens * BYTES_PER_TOKEN,
        "block_size": rng.choice([8, 16]),
        "max_num_seqs": rng.choice([1, 3, 16, 64]),
        "max_num_batched_tokens": rng.choice([1, 9, 64, 512]),
        "num_threads": rng.choice([1, 2]),
        "enable_prefix_caching": rng.random() < 0.7,
    }


def assert_begins_like(found: Answer, whole: Answer) -> None:
    assert found[1] == whole[1][: len(found[1])]


def interrupt(llm: LLM, prompts: list[Any], params: list[SamplingParams], step: int) -> Any:
    """The outputs that a KeyboardInterrupt in this step gives back; all of them if there are fewer steps."""
    original, count = ModelRunner.forward, 0

    def interrupted(self: ModelRunner, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise KeyboardInterrupt
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", interrupted)
        try:
            return llm.generate(prompts, params, use_tqdm=False)
        except KeyboardInterrupt as error:
            return error.outputs  # type: ignore[attr-defined]


def abort_some(llm: LLM, prompts: list[Any], params: list[SamplingParams], rng: random.Random) -> list[Any]:
    """Runs through EngineCore, arrivals spread over time; returns the requests."""
    assert llm._assembly is not None
    engine = llm._assembly.engine
    requests = [make_request(llm, f"r{i}", p, params[i].clone()) for i, p in enumerate(prompts)]
    waiting, num_steps = requests[::-1], 0
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 4, 30])):
            if waiting:
                engine.add_request(waiting.pop())
        engine.step()
        num_steps += 1
        if rng.random() < 0.2:
            engine.abort([f"r{rng.randrange(NUM_REQUESTS)}"])
        assert num_steps < 100_000
    return requests


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_requests_through_whatever_comes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = save_tiny_model(tmp_path / "tiny")
    num_preemptions, sizes = 0, []
    with open_llm(folder, max_model_len=MAX_LEN) as alone:
        for number in range(NUM_ROUNDS):
            prompts, params = random_prompts(rng), [random_params(rng) for _ in range(NUM_REQUESTS)]
            expected = [
                answers(alone.generate([prompt], one, use_tqdm=False))[0]
                for prompt, one in zip(prompts, params, strict=True)
            ]
            fields = random_engine(rng)
            with open_llm(folder, **fields) as llm:
                ending = ENDINGS[number % 3]
                if ending == "interrupt":
                    for output, whole in zip(
                        interrupt(llm, prompts, params, rng.randint(1, 60)), expected, strict=True
                    ):
                        found = answers([output])[0]  # type: ignore[arg-type]
                        assert_begins_like(found, whole)
                        assert not output.finished or found == whole, f"seed {seed}, round {number}"
                elif ending == "abort":
                    for request, whole in zip(abort_some(llm, prompts, params, rng), expected, strict=True):
                        assert tuple(request.output_token_ids) == whole[1][: request.num_output_tokens]
                        if request.finish_reason != "abort":
                            assert (request.text, request.finish_reason, request.stop_reason) == (whole[0], *whole[2:4])
                assert_nothing_left(llm)
                assert answers(llm.generate(prompts, params)) == expected, f"seed {seed}, round {number}: {fields}"
                assert_nothing_left(llm)
                num_preemptions += llm.stats.num_preemptions
            del llm, prompts, params, expected
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert num_preemptions > 0
    assert sizes[-1] - sizes[2] < 2000, f"objects grow: {sizes}"
