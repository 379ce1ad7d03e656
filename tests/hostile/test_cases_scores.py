"""CASES A18, A20, A21, E6: logprobs of outputs and prompts, scoring without output, and the memory they take."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedllm import LLM, RequestError, SamplingParams
from pagedllm.outputs import PromptLogprobs, RequestOutput
from tests.hostile.harness import (
    GREEDY,
    MAX_MODEL_LEN,
    STARVED,
    answers,
    assert_nothing_left,
    completion,
    forcing,
    open_llm,
)
from tests.tiny import SIZES, VOCAB_SIZE

PROMPT = [5 + i % 300 for i in range(40)]
BLOCK = 16


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Log-softmax in float64 of the logits that transformers computes: ids -> [len(ids), V]."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def log_softmax(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return log_softmax


def score_bytes(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Every entry, floats by their bits."""
    assert output.prompt_logprobs is not None
    return [
        tuple((i, e.logprob.hex(), e.rank, e.decoded_token) for i, e in (entries or {}).items())
        for entries in output.prompt_logprobs
    ]


def check_prompt_logprobs(found: PromptLogprobs | None, token_ids: list[int], expected: torch.Tensor, k: int) -> None:
    assert found is not None
    assert len(found) == len(token_ids)
    assert found[0] is None
    assert math.isnan(found.token_logprobs[0])
    for position in range(1, len(token_ids)):
        entries, row, own = found[position], expected[position - 1], token_ids[position]
        top = row.argsort(descending=True)[:k].tolist()
        assert list(entries) == list(dict.fromkeys([own, *top]))
        assert entries[own].rank == 1 + int((row > row[own]).sum())
        assert found.token_logprobs[position] == np.float32(entries[own].logprob)
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=2e-4)


# A18


@pytest.mark.parametrize("k", [None, 0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 1, -1])
def test_a18_the_sampled_token_stands_first_with_its_rank_and_nothing_stands_twice(
    folder: Path, reference: Any, k: int | None
) -> None:
    said = [5, 299, 17, 5, 301, 80]  # inside and outside the top
    params = SamplingParams(
        temperature=0, max_tokens=len(said), logprobs=k, ignore_eos=True, logits_processors=[forcing(said)]
    )
    with open_llm(folder, max_logprobs=VOCAB_SIZE + 1) as llm:
        output = completion(llm.generate([PROMPT], params))
    if k is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    assert output.token_ids == said
    expected = reference([*PROMPT, *said])
    for position, (token_id, entries) in enumerate(zip(said, output.logprobs, strict=True)):
        row = expected[len(PROMPT) - 1 + position]
        wanted = VOCAB_SIZE if k == -1 else min(k, VOCAB_SIZE)
        assert next(iter(entries)) == token_id
        top = sorted(entries, key=lambda t: entries[t].rank)[:wanted]
        assert len(top) == wanted
        assert set(entries) == {token_id, *top}
        torch.testing.assert_close(row[top], row.sort(descending=True).values[:wanted], rtol=0, atol=1e-4)  # near-ties
        assert len(entries) == wanted + (token_id not in top)
        assert entries[token_id].rank == 1 + int((row > row[token_id]).sum())
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=2e-4)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [21, VOCAB_SIZE + 1, -2, 1.0, True])
def test_a18_a20_a_number_beyond_the_limit_is_refused_before_any_work_at_every_index(
    llm: LLM, field: str, value: Any
) -> None:
    plain = SamplingParams(max_tokens=2)
    num_steps = llm.stats.num_steps
    for index in range(3):
        params = [plain.clone() for _ in range(3)]
        setattr(params[index], field, value)
        with pytest.raises(
            RequestError, match=rf"sampling_params\[{index}\]: {field} must be .* got {value}"
        ) as caught:
            llm.generate(["a", "b", "c"], params)
        assert (caught.value.code, caught.value.index, caught.value.field) == ("invalid_parameter", index, field)
    assert llm.stats.num_steps == num_steps


def test_a18_raw_logprobs_ignore_what_processed_ones_show(folder: Path) -> None:
    params = SamplingParams(temperature=0.5, top_k=2, seed=1, max_tokens=1, logprobs=4, logit_bias={9: 100.0})
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with open_llm(folder, logprobs_mode=mode) as llm:
            output = completion(llm.generate([PROMPT], params))
            assert output.logprobs is not None
            found[mode] = (output.token_ids, output.logprobs[0])
    (raw_ids, raw), (ids, processed) = found.values()
    assert raw_ids == ids == [9]
    assert raw[9].rank > 4
    assert len(raw) == 5
    assert (processed[9].rank, processed[9].logprob) == (1, pytest.approx(0.0, abs=1e-6))
    assert sorted(entry.logprob for entry in processed.values())[:2] == [-math.inf, -math.inf]


# A20


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, MAX_MODEL_LEN - 1])
@pytest.mark.parametrize("budget", [7, 512])
def test_a20_prompt_logprobs_equal_the_reference_at_every_length_and_chunk(
    folder: Path, reference: Any, length: int, budget: int
) -> None:
    token_ids = [5 + i * 7 % 300 for i in range(length)]
    with open_llm(folder, max_num_batched_tokens=budget) as llm:
        for params in (
            SamplingParams(max_tokens=1, prompt_logprobs=3),
            SamplingParams(max_tokens=0, prompt_logprobs=3),
        ):
            for _ in range(2):
                (output,) = llm.generate([token_ids], params, use_tqdm=False)
                check_prompt_logprobs(output.prompt_logprobs, token_ids, reference(token_ids), 3)
                assert len(output.outputs[0].token_ids) == params.max_tokens
        assert_nothing_left(llm)


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 5}, STARVED, {"enable_prefix_caching": False}])
def test_a20_neighbours_of_the_same_prefix_change_no_bit_whoever_asks(folder: Path, fields: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT, [*PROMPT, 9, 8], PROMPT[:BLOCK], [*PROMPT, 9]]
    ks = [3, None, -1, 0, None]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=k, logprobs=0) for k in ks]
    with open_llm(folder) as llm:
        alone = [llm.generate([p], one, use_tqdm=False)[0] for p, one in zip(prompts, params, strict=True)]
    with open_llm(folder, **fields) as llm:
        for _ in range(2):
            together = llm.generate(prompts, params, use_tqdm=False)
            assert answers(together) == [answers([output])[0] for output in alone]  # type: ignore[arg-type]
            for output, expected, k in zip(together, alone, ks, strict=True):
                assert (output.prompt_logprobs is None) == (k is None)
                if k is not None:
                    assert score_bytes(output) == score_bytes(expected)
        assert_nothing_left(llm)


def test_a20_what_a_scored_prompt_computed_serves_a_later_one_that_is_not(llm: LLM) -> None:
    llm.reset_prefix_cache()
    scored = llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    plain = llm.generate([PROMPT], GREEDY)[0]
    again = llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert (scored.num_cached_tokens, plain.num_cached_tokens, again.num_cached_tokens) == (0, 2 * BLOCK, 0)
    assert score_bytes(scored) == score_bytes(again)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a20_several_outputs_have_one_scored_prompt(folder: Path, temperature: float, max_tokens: int) -> None:
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True, "prompt_logprobs": 1}
    with open_llm(folder, max_num_batched_tokens=7, **STARVED) as llm:
        alone = llm.generate([PROMPT], SamplingParams(**fields))[0]
        several = llm.generate([PROMPT, PROMPT[:20]], SamplingParams(n=3, **fields))
        assert [len(output.outputs) for output in several] == [3, 3]
        assert several[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert score_bytes(several[0]) == score_bytes(alone)
        assert score_bytes(several[1]) == score_bytes(alone)[:20]
        assert_nothing_left(llm)


# A21


@pytest.mark.parametrize("k", [None, 0, 2])
def test_a21_max_tokens_0_scores_and_gives_an_empty_text(llm: LLM, k: int | None) -> None:
    num_output_tokens = llm.stats.num_output_tokens
    outputs = llm.generate([PROMPT, [5], PROMPT[:3]], SamplingParams(max_tokens=0, prompt_logprobs=k))
    for output, length in zip(outputs, (len(PROMPT), 1, 3), strict=True):
        assert (output.text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("", [], "length")
        assert (None if k is None else length) == (output.prompt_logprobs and len(output.prompt_logprobs))
    assert llm.stats.num_output_tokens == num_output_tokens
    assert_nothing_left(llm)


def test_a21_a_prompt_that_just_fits_is_scored(llm: LLM) -> None:
    full = [5 + i % 300 for i in range(MAX_MODEL_LEN)]
    output = llm.generate([full], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    assert np.isfinite(output.prompt_logprobs.token_logprobs[1:]).all()
    with pytest.raises(RequestError, match="no room for one new token"):
        llm.generate([full], SamplingParams(max_tokens=1, prompt_logprobs=0))


def test_a21_none_goes_to_the_models_length_and_1_is_one_token(llm: LLM) -> None:
    for max_tokens, expected in ((None, MAX_MODEL_LEN - len(PROMPT)), (1, 1)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0)
        output = llm.generate([PROMPT], params)[0]
        assert len(output.outputs[0].token_ids) == expected
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize("value", [-1, True, 0.0, "0"])
def test_a21_what_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=f"max_tokens must be None or an int >= 0, got {value!r}"):
        SamplingParams(max_tokens=value)


# E6


def test_e6_the_logits_of_a_long_prompt_are_never_there_at_once(tmp_path: Path) -> None:
    """150,000 tokens: 2,000 rows of them would take 1.2 GB."""
    import transformers

    sizes = {**SIZES, "vocab_size": 150_000, "hidden_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**{**sizes, "max_position_embeddings": 4096, "num_attention_heads": 2})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    from tests.tiny import save_tokenizer

    save_tokenizer(tmp_path)
    program = textwrap.dedent(
        """
        import resource, sys
        from pagedllm import LLM, SamplingParams

        def peak_mb():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

        llm = LLM(sys.argv[1], dtype="float32", num_threads=1, max_num_seqs=256, kv_cache_memory_bytes=8 << 20)
        prompt = [5 + i % 300 for i in range(2000)]
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        before = peak_mb()
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=5), use_tqdm=False)[0]
        print(peak_mb() - before, len(output.prompt_logprobs))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    more_mb, length = map(int, done.stdout.split())
    assert length == 2000
    assert more_mb < 150
