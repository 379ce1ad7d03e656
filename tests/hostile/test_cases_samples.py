"""CASES A15 and A17: n samples of a prompt, through LLM on a tiny model; also n under everything that may go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, RequestError, SamplingParams
from tests.hostile.harness import (
    BYTES_PER_TOKEN,
    STARVED,
    answers,
    assert_nothing_left,
    fixed,
    ids,
    open_llm,
)
from tests.tiny import EOS

PROMPT = "one two three four five six"
FLAT = fixed({})  # every token as likely as any other


def token_ids(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# A15: a seed with n > 1


def test_a_seed_with_n_gives_different_streams_and_the_same_set_again(folder: Path, llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True, logits_processors=[FLAT])
    first = llm.generate(PROMPT, params, use_tqdm=False)
    assert len({tuple(output) for output in token_ids(first[0])}) == 4
    assert len({output[position] for output in token_ids(first[0]) for position in range(8)}) > 20
    assert answers(llm.generate(PROMPT, params, use_tqdm=False)) == answers(first)
    with open_llm(folder, seed=99, block_size=8, max_num_seqs=3) as other:
        in_company = other.generate(["zyx", PROMPT, "a"], [SamplingParams(), params, SamplingParams()], use_tqdm=False)
        assert answers([in_company[1]]) == answers(first)  # type: ignore[arg-type]


def test_four_requests_of_one_seed_are_four_times_the_first_of_n_4(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True)
    expected = token_ids(llm.generate(PROMPT, params, use_tqdm=False)[0])
    params.n = 1
    assert ids(llm.generate([PROMPT] * 4, params, use_tqdm=False)) == [expected[0]] * 4


def test_n_1_is_index_0_of_any_n_also_without_a_seed(folder: Path) -> None:
    found = []
    for n in (1, 2, 5):
        with open_llm(folder) as fresh:
            outputs = fresh.generate([PROMPT, "zyx"], SamplingParams(n=n, max_tokens=8), use_tqdm=False)
            found.append([token_ids(output) for output in outputs])
    assert [[samples[0] for samples in outputs] for outputs in found] == [[s[0] for s in found[0]]] * 3
    assert [samples[:2] for samples in found[2]] == found[1]


# A17: n loses, overwrites or hangs nothing

PARAMS: dict[str, Any] = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def forty(llm: LLM) -> list[Any]:
    return answers(llm.generate(PROMPT, SamplingParams(n=40, **PARAMS), use_tqdm=False))


@pytest.mark.parametrize("n", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("fields", [{}, STARVED, {**STARVED, "enable_prefix_caching": False, "block_size": 8}])
def test_any_n_against_eight_seqs_and_a_pool_of_one_gives_n_outputs_in_order(
    folder: Path, forty: list[Any], fields: dict[str, Any], n: int
) -> None:
    with open_llm(folder, max_num_seqs=8, **fields) as llm:
        outputs = llm.generate(["zyx", PROMPT, "a"], [SamplingParams(n=k, **PARAMS) for k in (2, n, 1)], use_tqdm=False)
        assert [completion.index for completion in outputs[1].outputs] == list(range(n))
        assert answers([outputs[1]]) == forty[:n]  # type: ignore[arg-type]
        assert [len(output.outputs) for output in outputs] == [2, n, 1]
        assert_nothing_left(llm)


def test_samples_are_preempted_one_by_one_and_end_as_without(folder: Path, forty: list[Any]) -> None:
    """First come, first served looks no further ahead than a block, so all eight begin."""
    pool = {"kv_cache_memory_bytes": 10 * 16 * BYTES_PER_TOKEN, "scheduling_policy": "fcfs"}
    with open_llm(folder, max_num_seqs=8, **pool) as llm:
        outputs = llm.generate(PROMPT, SamplingParams(n=40, **PARAMS), use_tqdm=False)
        assert answers(outputs) == forty
        assert 0 < llm.stats.num_preemptions == outputs[0].metrics.num_preemptions
        assert_nothing_left(llm)


def test_a_sample_that_stops_at_step_1_leaves_the_others_whole(llm: LLM) -> None:
    plain = token_ids(llm.generate(PROMPT, SamplingParams(n=5, seed=3, max_tokens=12, ignore_eos=True))[0])
    first = plain[1][0]
    assert [output[0] for output in plain].count(first) == 1
    params = SamplingParams(n=5, seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=[first])
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[1].token_ids == [first]
    for completion, whole in zip(output.outputs, plain, strict=True):
        is_stopped = first in whole
        end = whole.index(first) + 1 if is_stopped else len(whole)
        assert completion.token_ids == whole[:end]
        assert completion.finish_reason == ("stop" if is_stopped else "length")


def test_greedy_with_n_3_gives_equal_copies(llm: LLM) -> None:
    one = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    three = llm.generate(PROMPT, SamplingParams(n=3, temperature=0, max_tokens=8), use_tqdm=False)
    assert answers(three) == answers(one) * 3


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
def test_an_n_that_is_no_count_is_refused(n: Any) -> None:
    with pytest.raises(RequestError, match=f"n must be an int >= 1, got {n}"):
        SamplingParams(n=n)


def test_every_parameter_holds_for_every_sample_whether_it_forked_or_not(folder: Path) -> None:
    """Masks, bias, penalties and callables know each output's own tokens. One seq at a time leaves nothing to fork."""
    seen: list[list[int]] = []

    def watch(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(output))
        return logits

    params = SamplingParams(
        n=4,
        seed=5,
        max_tokens=10,
        min_tokens=10,
        temperature=1.5,
        bad_words=["e", "the"],
        allowed_token_ids=list(range(1, 200)),
        repetition_penalty=1.4,
        presence_penalty=1.0,
        logit_bias={9: 1.5},
        logits_processors=[watch],
        logprobs=0,
    )
    found = []
    for max_num_seqs in (8, 1):
        seen.clear()
        with open_llm(folder, max_num_seqs=max_num_seqs) as llm:
            found.append(llm.generate(PROMPT, params, use_tqdm=False))
        outputs = token_ids(found[-1][0])
        assert all(0 < token_id < 200 and token_id != EOS for output in outputs for token_id in output)
        assert set(map(tuple, seen)) == {tuple(output[:i]) for output in outputs for i in range(10)}
    assert answers(found[0]) == answers(found[1])
    assert len({tuple(output) for output in outputs}) == 4
