"""Beam search equals transformers' `generate(num_beams=...)` in float32, ids and scores, whatever pool and batch.

The models are tiny and random; stop ids that their beams meet make hypotheses of all lengths end. Gemma 3 caps its
logits, which leaves beams so close that float32 rounding orders them: it is compared with itself only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, BeamSearchParams, RequestError
from pagedllm.outputs import RequestOutputs
from tests.hostile.harness import BYTES_PER_TOKEN, assert_nothing_left, open_llm
from tests.tiny import EOS, save_tiny_model

PROMPTS = [[5, 6, 7, 8], list(range(20, 70)), [9], [30] * 16]
STOPS = list(range(40, 60))
PENALTIES = (1.0, 0.0, -0.7, 2.5)
EARLY: tuple[Any, ...] = (False, True, "never")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("beams") / request.param, request.param)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with open_llm(model_folder, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def beams_of_transformers(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    ends = list(params.stop_token_ids or ()) if params.ignore_eos else [EOS, *(params.stop_token_ids or ())]
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        early_stopping=params.early_stopping,
        length_penalty=params.length_penalty,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        end = next((i + 1 for i, token_id in enumerate(output) if token_id in ends), len(output))
        beams.append((output[:end], score))
    return beams


def ours(outputs: RequestOutputs, index: int) -> list[tuple[list[int], float]]:
    return [(completion.token_ids, completion.score) for completion in outputs[index].outputs]  # type: ignore[misc]


def exact(outputs: RequestOutputs) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, float(c.cumulative_logprob or 0).hex())
        for output in outputs
        for c in output.outputs
    ]


@pytest.mark.parametrize("width", [3, 8])
def test_ids_and_scores_are_those_of_transformers(llm: LLM, theirs: Any, width: int) -> None:
    plain = llm.beam_search(PROMPTS, BeamSearchParams(width, 10, ignore_eos=True), use_tqdm=False)
    stops = sorted({completion.token_ids[4] for output in plain for completion in output.outputs[1:]})[:4]
    num_short = 0
    for early_stopping, penalty in product(EARLY, PENALTIES):
        params = BeamSearchParams(width, 10, penalty, early_stopping, stop_token_ids=stops)
        outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
        for index, prompt in enumerate(PROMPTS):
            found, expected = ours(outputs, index), beams_of_transformers(theirs, prompt, params)
            assert [ids for ids, _ in found] == [ids for ids, _ in expected], (early_stopping, penalty, index)
            assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-5)
            num_short += sum(len(ids) < 10 for ids, _ in found)
    assert num_short > 20  # ended by an id, not by the length
    assert_nothing_left(llm)


def test_without_any_end_all_beams_reach_the_length_as_theirs_do(llm: LLM, theirs: Any) -> None:
    params = BeamSearchParams(4, 20, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for index, prompt in enumerate(PROMPTS):
        assert [ids for ids, _ in ours(outputs, index)] == [
            ids for ids, _ in beams_of_transformers(theirs, prompt, params)
        ]
        assert {c.finish_reason for c in outputs[index].outputs} == {"length"}


def test_one_beam_is_greedy(llm: LLM) -> None:
    from pagedllm import SamplingParams

    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    beams = llm.beam_search(PROMPTS, BeamSearchParams(1, 12, early_stopping=True), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in beams] == [o.outputs[0].token_ids for o in greedy]


def test_the_cumulative_logprob_is_the_sum_over_the_outputs_tokens(llm: LLM, theirs: Any) -> None:
    (output,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(3, 10, 0.6, stop_token_ids=STOPS), use_tqdm=False)
    for completion in output.outputs:
        ids = torch.tensor([PROMPTS[0] + completion.token_ids])
        with torch.inference_mode():
            logprobs = theirs(ids).logits[0].double().log_softmax(-1)
        begin = len(PROMPTS[0])
        total = sum(float(logprobs[begin - 1 + i, token_id]) for i, token_id in enumerate(completion.token_ids))
        assert completion.cumulative_logprob == pytest.approx(total, rel=1e-5, abs=1e-4)
        assert completion.score == completion.cumulative_logprob / len(completion.token_ids) ** 0.6


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_pool_that_just_holds_the_widest_gives_the_same_bits(kind: str, block_size: int, tmp_path: Path) -> None:
    """Beside others, which are preempted for it, in a batch cut into small steps."""
    model_folder = save_tiny_model(tmp_path, kind)
    params = BeamSearchParams(3, 30, stop_token_ids=STOPS[:1])
    with open_llm(model_folder, max_num_seqs=64) as roomy:
        expected = exact(roomy.beam_search(PROMPTS, params, use_tqdm=False))
    num_shared = 50 // block_size
    num_blocks = max(num_shared + 3 * (-(-79 // block_size) - num_shared), 128 // block_size)
    tight = {"kv_cache_memory_bytes": num_blocks * block_size * BYTES_PER_TOKEN, "block_size": block_size}
    for is_cached, chunk in ((True, 512), (False, 512), (True, 5)):
        with open_llm(model_folder, enable_prefix_caching=is_cached, max_num_batched_tokens=chunk, **tight) as small:
            assert exact(small.beam_search(PROMPTS, params, use_tqdm=False)) == expected
            assert_nothing_left(small)


def test_beams_wider_than_the_pool_can_ever_hold_are_refused_at_once(model_folder: Path) -> None:
    with open_llm(model_folder, kv_cache_memory_bytes=8 * 16 * BYTES_PER_TOKEN, max_model_len=64) as small:
        (output,) = small.beam_search([[5] * 20], BeamSearchParams(4, 40), on_error="return", use_tqdm=False)
        assert isinstance(output.error, RequestError)
        assert output.error.code == "never_fits"
        assert str(output.error) == (
            "4 beams of 20 + 40 tokens never fit: they take 13 blocks of 16, the KV cache holds 8"
        )
        assert small.stats.num_computed_tokens == 0
        assert len(small.beam_search([[5] * 20], BeamSearchParams(2, 40), use_tqdm=False)[0].outputs) == 2
        assert_nothing_left(small)
