"""CASES (c): engine and scheduler, through LLM on tiny models. tests/engine has them without a model, on more seeds."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, BatchError, RequestError, SamplingParams
from pagedllm.ops.library import choose, cpu_flags
from tests.hostile.harness import (
    BYTES_PER_TOKEN,
    GREEDY,
    MAX_MODEL_LEN,
    STARVED,
    answers,
    assert_nothing_left,
    completion,
    errors,
    ids,
    make_request,
    open_llm,
    solo,
)
from tests.ops.isa import run_on_every_instruction_set
from tests.tiny import VOCAB_SIZE

BLOCK = 16


def pool_of(num_blocks: int) -> dict[str, int]:
    return {"kv_cache_memory_bytes": num_blocks * BLOCK * BYTES_PER_TOKEN, "max_model_len": num_blocks * BLOCK}


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


# C1


def test_c1_preemption_changes_nothing_of_what_a_request_gets(folder: Path) -> None:
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 0},
        {"seed": 2, "stop": ["e", "qu"], "presence_penalty": 0.5},
        {"seed": 3, "bad_words": ["the", "e"], "min_tokens": 20, "logit_bias": {9: 3.0}},
        {"temperature": 0, "allowed_token_ids": list(range(60, 120)), "logprobs": 1},
    ]
    prompts = [random_ids(rng, rng.randint(5, 40)) for _ in range(16)]
    params = [SamplingParams(max_tokens=60, **kinds[i % 6]) for i in range(16)]
    with open_llm(folder, max_num_seqs=16) as roomy:
        expected = roomy.generate(prompts, params)
        assert roomy.stats.num_preemptions == 0
    with open_llm(folder, max_num_seqs=16, **STARVED) as tight:
        outputs = tight.generate(prompts, params)
        assert tight.stats.num_preemptions > 0
        assert_nothing_left(tight)
    assert answers(outputs) == answers(expected)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


# C3


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize(
    ("length", "code"),
    [(4 * BLOCK + 1, "prompt_too_long"), (10 * MAX_MODEL_LEN, "prompt_too_long"), (4 * BLOCK, "prompt_too_long")],
)
def test_c3_a_prompt_that_never_fits_is_its_own_error_at_once_wherever_it_stands(
    folder: Path, place: int, length: int, code: str
) -> None:
    with open_llm(folder, **pool_of(4)) as llm:
        prompts = [[5, 6, i + 7] for i in range(5)]
        expected = llm.generate(prompts, GREEDY).texts
        prompts[place] = [5] * length
        outputs = llm.generate(prompts, GREEDY, on_error="return")
        assert [error and error.code for error in errors(outputs)] == [code if i == place else None for i in range(5)]
        assert f"{length:,} tokens" in str(outputs[place].error)
        assert [t for i, t in enumerate(outputs.texts) if i != place] == [
            t for i, t in enumerate(expected) if i != place
        ]
        assert_nothing_left(llm)


@pytest.mark.parametrize("length", [4 * BLOCK - 1, 3 * BLOCK, 1])
def test_c3_a_prompt_that_fits_without_its_whole_output_ends_by_length(folder: Path, length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    with open_llm(folder, **pool_of(4)) as llm:
        outputs = llm.generate([[5] * length, [6] * length, [7, 8]], params)
        assert [completion(outputs, i).finish_reason for i in range(3)] == ["length"] * 3
        assert len(completion(outputs).token_ids) == 4 * BLOCK - length
        assert answers(outputs) == solo(llm, [[5] * length, [6] * length, [7, 8]], [params] * 3)


# C4, C5


@pytest.mark.parametrize("num_blocks", [8, 20, 200])
def test_c4_no_prompt_is_given_the_cache_of_another(folder: Path, num_blocks: int) -> None:
    """Few beginnings in all mixtures and depths, through pools that evict: every hit must be the right one."""
    rng = random.Random(num_blocks)
    pieces = [random_ids(rng, BLOCK) for _ in range(3)]
    prompts = [
        sum((rng.choice(pieces) for _ in range(rng.randint(0, 4))), random_ids(rng, rng.choice([0, 0, 3])))
        + random_ids(rng, rng.randint(1, 9))
        for _ in range(60)
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    fields = {"kv_cache_memory_bytes": num_blocks * BLOCK * BYTES_PER_TOKEN, "max_model_len": 8 * BLOCK}
    with open_llm(folder, enable_prefix_caching=False, **fields) as llm:
        expected = answers(llm.generate(prompts, params))
        assert llm.stats.num_cached_tokens == 0
    for chunk in (8, 64):
        with open_llm(folder, max_num_batched_tokens=chunk, **fields) as llm:
            assert answers(llm.generate(prompts, params)) == expected
            assert llm.stats.num_cached_tokens > 0
            assert answers(llm.generate(prompts[::-1], params))[::-1] == expected


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_c5_a_full_hit_leaves_the_last_token_to_compute(folder: Path, length: int) -> None:
    prompt = random_ids(random.Random(length), length)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2)
    with open_llm(folder) as llm:
        outputs = [
            *llm.generate([prompt], params),
            *llm.generate([prompt], params),
            *llm.generate([prompt] * 3, params),
        ]
        hit = (length - 1) // BLOCK * BLOCK
        assert [output.num_cached_tokens for output in outputs] == [0, *[hit] * 4]
        assert all(output.num_cached_tokens <= length - 1 for output in outputs)
        found = answers(outputs)
        assert found == [found[0]] * 5


# C6


def exploding_prompts() -> Iterator[str]:
    yield "one"
    raise OSError("the disk went away")


def test_c6_a_refused_list_leaves_nothing_behind(llm: LLM) -> None:
    fresh = answers(llm.generate(["x"], GREEDY))
    for bad in ([VOCAB_SIZE], [], [5] * 5000):
        with pytest.raises(RequestError, match=r"^prompts\[2\]: "):
            llm.generate(["one", "two", bad], GREEDY)
        assert_nothing_left(llm)
        assert answers(llm.generate(["x"], GREEDY)) == fresh


def test_c6_a_prompt_iterator_that_raises_leaves_nothing_behind(llm: LLM) -> None:
    fresh = answers(llm.generate(["x"], GREEDY))
    with pytest.raises(OSError, match="the disk went away"):
        llm.generate(exploding_prompts(), GREEDY)
    assert_nothing_left(llm)
    assert answers(llm.generate(["x"], GREEDY)) == fresh


@pytest.mark.parametrize("step", [0, 1, 5])
def test_c6_a_logits_processor_that_raises_ends_its_own_request_only(llm: LLM, step: int) -> None:
    def failing(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == step:
            raise KeyError("no such word")
        return logits

    params = [GREEDY, SamplingParams(temperature=0, logits_processors=[failing]), GREEDY]
    expected = llm.generate(["a", "b", "c"], GREEDY)
    with pytest.raises(BatchError) as caught:
        llm.generate(["a", "b", "c"], params)
    outputs = caught.value.outputs
    assert str(outputs[1].error) == "logits_processors[0] (failing) raised KeyError: 'no such word'"
    assert (outputs[1].error.code, outputs[1].error.index) == ("invalid_parameter", 1)
    assert outputs[1].error.__context__ is None or outputs[1].error.__suppress_context__
    assert [outputs[0].text, outputs[2].text] == [expected.texts[0], expected.texts[2]]
    assert_nothing_left(llm)
    assert answers(llm.generate(["a", "b", "c"], GREEDY)) == answers(expected)


# C8, C9, C11


def test_c8_outputs_are_in_input_order_whatever_their_lengths(llm: LLM) -> None:
    rng = random.Random(8)
    prompts = [f"{i % 60} " + "one two " * rng.randint(0, 6) for i in range(120)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 12), ignore_eos=True) for _ in prompts]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.index for output in outputs] == list(range(120))
    assert [len(token_ids) for token_ids in ids(outputs)] == [p.max_tokens for p in params]
    assert [int(output.request_id) - int(outputs[0].request_id) for output in outputs] == list(range(120))
    for i in range(60):
        short, long = sorted((ids(outputs)[i], ids(outputs)[i + 60]), key=len)
        if prompts[i] == prompts[i + 60]:
            assert long[: len(short)] == short


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_c9_many_short_requests_end_through_pools_of_any_size_with_aborts(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    with open_llm(folder, max_num_seqs=rng.randint(1, 16), **pool_of(rng.randint(3, 12))) as llm:
        assembly = llm._assembly
        assert assembly is not None
        engine = assembly.engine
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 5, 17)]
        requests = [
            make_request(llm, str(i), random_ids(rng, rng.randint(1, 40)), rng.choice(params)) for i in range(120)
        ]
        for request in requests:
            engine.add_request(request)
        num_steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            num_steps += 1
            if rng.random() < 0.1:
                engine.abort([str(rng.randrange(120))])
            assert num_steps < 3000
        assert all(request.is_finished for request in requests)
        assert_nothing_left(llm)


def test_c11_host_memory_is_flat_over_calls(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=2, stop="zzz", bad_words=["e"], repetition_penalty=1.1, logprobs=1, ignore_eos=True
    )
    prompts = [[5 + i, 6, 7] for i in range(10)]

    def objects_after(number: int) -> int:
        for _ in range(number):
            llm.generate(prompts, params)
        gc.collect()
        return len(gc.get_objects())

    objects_after(5)
    before = objects_after(5)
    assert objects_after(50) - before < 50  # 500 requests: one object kept of each call would be seen
    assert llm._assembly is not None
    assert llm._assembly.engine._state.outputs._ends == {}


# C14, C15, C17


@pytest.mark.parametrize("kind", ["folder", "window_folder"])
def test_c14_chunks_of_any_size_change_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    model, rng = request.getfixturevalue(kind), random.Random(14)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 60]
    shared = random_ids(rng, 2 * BLOCK)
    prompts = [random_ids(rng, n) for n in lengths] + [shared + random_ids(rng, n) for n in (1, 7, BLOCK)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    with open_llm(model) as llm:
        expected = solo(llm, prompts, [params] * len(prompts))
    for chunk in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 512):
        with open_llm(model, max_num_batched_tokens=chunk) as llm:
            outputs = llm.generate(prompts, params)
            assert answers(outputs) == expected, f"chunks of {chunk}"
            assert llm.stats.num_output_tokens == 6 * len(prompts)  # none was sampled before the last chunk


def reference_tokens(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers, a plain full forward over the whole sequence, one request at a time, no cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("kind", ["folder", "window_folder"])
def test_c15_c17_batches_of_1_to_9_give_the_tokens_of_a_plain_forward_by_transformers(
    request: pytest.FixtureRequest, kind: str
) -> None:
    model, rng = request.getfixturevalue(kind), random.Random(15)
    prompts = [random_ids(rng, n) for n in (3, 70, 1, 17, 32, 5, 48, 9, 26)]
    expected = reference_tokens(model, prompts, 8)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with open_llm(model) as llm:
        assert llm.info()["kernels"] == choose("auto", cpu_flags(), os.environ.get("PAGEDLLM_KERNELS"))
        for number in range(1, 10):
            assert ids(llm.generate(prompts[:number], params)) == expected[:number]


@pytest.mark.slow
def test_c15_on_the_other_instruction_sets() -> None:
    run_on_every_instruction_set(__file__, keyword="c15 and not other")
