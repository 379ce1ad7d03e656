"""CASES (h): determinism. The differential matrix (tests/e2e) has the settings; here are raw logits and processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedllm import LLM, SamplingParams
from tests.hostile.harness import GREEDY, SMALL, answers, errors, open_llm
from tests.tiny import VOCAB_SIZE

RNG = random.Random(64)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(RNG.choice([1, 2, 7, 16, 17, 33, 60]))] for _ in range(64)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=RNG.randint(2, 8), ignore_eos=True, logprobs=-1)
    if i % 2
    else SamplingParams(seed=i, max_tokens=RNG.randint(2, 8), ignore_eos=True, logprobs=-1)
    for i in range(64)
]
PROCESS = """
import json, sys
from pagedllm import LLM, SamplingParams
from tests.hostile import test_cases_h as h
threads, folder = int(sys.argv[1]), sys.argv[2]
with LLM(folder, **{**h.SMALL, "num_threads": threads}) as llm:
    outputs = llm.generate(h.PROMPTS[:16], h.PARAMS[:16]) + llm.generate(["one"] * 3, SamplingParams(max_tokens=9))
print(json.dumps([h.fingerprint(answer) for answer in h.answers(outputs)]))
"""


def fingerprint(answer: tuple[Any, ...]) -> str:
    import hashlib

    return hashlib.blake2b(repr(answer).encode(), digest_size=12).hexdigest()


def logits_bits(outputs: Any) -> list[bytes]:
    """The whole row of raw logprobs at every position, by its bits."""
    found = []
    for output in outputs:
        dicts = output.outputs[0].logprobs
        found.append(b"".join(p.token_ids.tobytes() + p.logprobs.tobytes() for p in dicts._positions))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["folder", "window_folder"])
def test_h1_logits_are_bitwise_equal_alone_together_reversed_and_for_any_max_num_seqs(
    request: pytest.FixtureRequest, kind: str, dtype: str
) -> None:
    model = request.getfixturevalue(kind)
    fields: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False}
    with open_llm(model, **fields) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        expected = logits_bits(alone)
        assert len(set(expected)) == 64
        backwards = llm.generate(PROMPTS[::-1], PARAMS[::-1])[::-1]
        assert logits_bits(backwards) == expected
    for max_num_seqs, threads in ((64, 2), (7, 1), (2, 2)):
        with open_llm(model, **fields, max_num_seqs=max_num_seqs) as llm:
            assert logits_bits(llm.generate(PROMPTS, PARAMS)) == expected, f"max_num_seqs={max_num_seqs}, {threads}"


@pytest.mark.parametrize("kind", ["folder", "window_folder"])
def test_h2_the_prefix_cache_changes_nothing_cold_warm_or_off_for_any_chunk(
    request: pytest.FixtureRequest, kind: str
) -> None:
    model, rng = request.getfixturevalue(kind), random.Random(2)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts = [shared[:n] + [rng.randrange(3, VOCAB_SIZE) for _ in range(m)] for n in (16, 33, 70) for m in (1, 5, 20)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
    with open_llm(model, enable_prefix_caching=False) as llm:
        expected = [logits_bits(llm.generate([prompt], params))[0] for prompt in prompts]
    for chunk in (1, 5, 16, 17, 64):
        with open_llm(model, max_num_batched_tokens=chunk) as llm:
            cold = llm.generate(prompts, params)
            warm = llm.generate(prompts, params)
            assert sum(output.num_cached_tokens for output in warm) > 0
            assert logits_bits(cold) == logits_bits(warm) == expected, f"chunks of {chunk}"


def answers_of_process(folder: Path, threads: int) -> list[str]:
    command = [sys.executable, "-c", PROCESS, str(threads), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: list[str] = json.loads(result.stdout)
    return found


def answers_here(folder: Path, threads: int) -> list[str]:
    with open_llm(folder, num_threads=threads) as llm:
        outputs = llm.generate(PROMPTS[:16], PARAMS[:16]) + llm.generate(["one"] * 3, SamplingParams(max_tokens=9))
    return [fingerprint(answer) for answer in answers(outputs)]  # type: ignore[arg-type]


def test_h3_another_process_with_other_threads_gives_the_same_even_without_seeds(folder: Path) -> None:
    here = answers_here(folder, 1)
    assert len(set(here)) == 19
    assert answers_here(folder, 2) == here
    assert answers_of_process(folder, 2) == here


@pytest.mark.slow
def test_h3_five_processes_agree(folder: Path) -> None:
    here = answers_here(folder, 1)
    for threads in (1, 2, 1, 2, 3):
        assert answers_of_process(folder, threads) == here


# `deterministic`


def test_a_cpu_is_always_deterministic_and_says_so(folder: Path) -> None:
    for value in (None, True):
        with open_llm(folder, deterministic=value) as llm:
            assert llm.info()["deterministic"] is True
    with pytest.raises(ValueError, match=r"^deterministic=False is refused on a CPU"):
        open_llm(folder, deterministic=False)


def test_the_readable_twins_promise_nothing_and_say_so(folder: Path) -> None:
    with open_llm(folder, kernels="reference") as llm:
        assert llm.info()["deterministic"] is False
        assert llm.generate("one", SamplingParams(max_tokens=1))[0].text is not None
    with pytest.raises(ValueError, match=r"^deterministic=True is refused with kernels='reference'"):
        open_llm(folder, kernels="reference", deterministic=True)


def test_info_tells_what_is_in_use(llm: LLM, folder: Path) -> None:
    info = llm.info()
    assert info["model"] == str(folder)
    assert (info["dtype"], info["device"], info["num_threads"], info["block_size"]) == ("float32", "cpu", 1, 16)
    assert (info["max_model_len"], info["max_num_seqs"]) == (SMALL["max_model_len"], SMALL["max_num_seqs"])
    assert errors(llm.generate("one", GREEDY)) == [None]
