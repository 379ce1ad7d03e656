"""Scores against a plain loop over transformers in float32: seams, candidates, windows, and greedy decoding itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedllm import LLM, BatchError, NotSupportedError, RequestError, SamplingParams
from pagedllm.outputs import Loglikelihood
from tests.tiny import BOS, EOS, VOCAB_SIZE, save_tiny_model

MAX_MODEL_LEN = 96
Reference = Callable[[list[int], list[int]], tuple[float, bool]]
CONTEXT = "the quick brown fox jumps over the lazy dog one two three four five six seven"
LONG = "the quick brown fox jumps over the lazy dog. one two three four five six seven eight nine ten! " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("scoring") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def open_llm(folder: Path, **fields: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    return LLM(folder, **{**settings, **fields})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """(sum of logprobs, is greedy) of a continuation after a context, one forward pass a pair."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].double()
        targets = torch.tensor(continuation)
        total = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
        return float(total), bool((logits.argmax(-1) == targets).all())

    return score


def encode(llm: LLM, text: str) -> list[int]:
    assert llm._assembly is not None
    return llm._assembly.builder.tokenizer.encode(text)


def check(found: Loglikelihood, expected: tuple[float, bool], continuation: list[int]) -> None:
    assert found.logprob == pytest.approx(expected[0], abs=1e-3)
    assert found.is_greedy is expected[1]
    assert found.token_ids == continuation
    assert found.num_tokens == len(continuation) == len(found.token_logprobs)
    assert found.token_logprobs.dtype == np.float32
    assert found.logprob == pytest.approx(float(found.token_logprobs.sum(dtype=np.float64)), abs=0)


def test_candidates_of_shared_prompts_are_scored_as_pairs_alone_and_nested_alike(
    llm: LLM, reference: Reference
) -> None:
    prompts = [CONTEXT, CONTEXT, "a", [5, 6, 7]]
    candidates = [[" eight", " nine ten", " the"], [" ten"], [" one", "b"], [[8, 9], " two"]]
    found = llm.loglikelihood(prompts, candidates)
    assert [len(scores) for scores in found] == [3, 1, 2, 2]
    for prompt, texts, scores in zip(prompts, candidates, found, strict=True):
        context = prompt if isinstance(prompt, list) else encode(llm, prompt)
        for text, score in zip(texts, scores, strict=True):
            continuation = text if isinstance(text, list) else encode(llm, text)
            check(score, reference(context, continuation), continuation)
    flat = llm.loglikelihood([CONTEXT, "a"], [" eight", "b"])
    assert flat == [found[0][0], found[2][1]]
    assert flat[0].token_logprobs.tobytes() == found[0][0].token_logprobs.tobytes()


@pytest.mark.parametrize("end", ["", " ", "  ", "\n", " \n "])
def test_whitespace_at_the_prompts_end_moves_to_the_continuation(llm: LLM, reference: Reference, end: str) -> None:
    (found,) = llm.loglikelihood(["the quick" + end], ["brown fox"])
    context, whole = encode(llm, "the quick"), encode(llm, "the quick" + end + "brown fox")
    check(found, reference(context, whole[len(context) :]), whole[len(context) :])


def test_a_token_across_the_seam_is_cut_as_harnesses_do_and_told(
    llm: LLM, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    context, whole = encode(llm, "the quic"), encode(llm, "the quick brown fox jumps")
    assert whole[: len(context)] != context
    (found,) = llm.loglikelihood(["the quic"], ["k brown fox jumps"])
    check(found, reference(context, whole[len(context) :]), whole[len(context) :])
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "1 of 1 continuations share a token with the end of their prompt, and are cut there as evaluation harnesses "
        "do: begin them with a space, or pass token ids"
    ]


@pytest.mark.parametrize("prompt", ["", " ", []])
def test_an_empty_prompt_is_the_models_bos_token(llm: LLM, reference: Reference, prompt: Any) -> None:
    space = prompt if isinstance(prompt, str) else ""
    continuation = encode(llm, space + "the fox")
    check(llm.loglikelihood([prompt], ["the fox"])[0], reference([BOS], continuation), continuation)
    with_bos = llm.loglikelihood([prompt], [[BOS, 9]])[0]
    check(with_bos, reference([BOS], [9]), [9])


def test_messages_are_scored_behind_the_templates_text(llm: LLM, reference: Reference) -> None:
    found = llm.loglikelihood([{"messages": [{"role": "user", "content": "the fox"}]}], [" jumps"])[0]
    context, continuation = encode(llm, "<s>[user]the fox</s>[assistant]"), encode(llm, " jumps")
    check(found, reference(context, continuation), continuation)


def test_is_greedy_agrees_with_greedy_decoding_to_the_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5 + i, 9, 40 + 3 * i] for i in range(24)]
    greedy = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    candidates = [
        [ids, ids[:3], [*ids[:2], (ids[2] + 1) % VOCAB_SIZE], [(ids[0] + 1) % VOCAB_SIZE, *ids[1:]]] for ids in greedy
    ]
    found = llm.loglikelihood(prompts, candidates)
    assert [[score.is_greedy for score in scores] for scores in found] == [[True, True, False, False]] * 24


def test_scores_are_the_logprobs_of_the_same_tokens_decoded_to_the_bit(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=9, ignore_eos=True, logprobs=0)
    outputs = llm.generate([CONTEXT, "a", "zyx"], params)
    found = llm.loglikelihood(
        [output.prompt_token_ids for output in outputs], [output.outputs[0].token_ids for output in outputs]
    )
    for score, output in zip(found, outputs, strict=True):
        assert output.outputs[0].token_logprobs is not None
        assert score.token_logprobs.tobytes() == output.outputs[0].token_logprobs.tobytes()


def test_ties_are_greedy_for_the_lowest_id_only(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "flat", initializer_range=1e-30)
    with open_llm(folder) as llm:
        found = llm.loglikelihood([[5, 6]], [[[0], [1], [0, 0], [0, 1]]])[0]
    assert [score.is_greedy for score in found] == [True, False, True, False]
    assert {score.logprob / score.num_tokens for score in found} == {float(np.float32(-math.log(VOCAB_SIZE)))}


def test_what_prompts_share_is_computed_once(folder: Path) -> None:
    context = [5 + i % 300 for i in range(64)]
    with open_llm(folder, max_num_batched_tokens=512) as llm:
        llm.loglikelihood([context], [[[9, i, 11] for i in range(50, 66)]])
        assert llm.stats.num_computed_tokens == 66 + 15 * (66 - 48)  # whole blocks before the first wanted logits
    with open_llm(folder, enable_prefix_caching=False) as llm:
        llm.loglikelihood([context], [[[9, i, 11] for i in range(50, 66)]])
        assert llm.stats.num_computed_tokens == 16 * 66


def test_equal_pairs_run_once_and_those_of_another_seam_do_not(llm: LLM) -> None:
    before = llm.stats.num_prompt_tokens
    found = llm.loglikelihood([[5, 6, 7], [5, 6, 7], [5, 6]], [[8, 9], [8, 9], [7, 8, 9]])
    assert llm.stats.num_prompt_tokens - before == 10
    assert found[0] == found[1] != found[2]
    assert [score.num_tokens for score in found] == [2, 2, 3]
    assert found[2].token_logprobs[1:].tobytes() == found[0].token_logprobs.tobytes()


def plain_windows(token_ids: list[int], first: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, scored) as lm-evaluation-harness makes them for a model of `size` + 1 tokens."""
    inputs = [first, *token_ids]
    for begin in range(0, len(token_ids), size):
        end = min(begin + size, len(token_ids))
        start = begin if end - begin == size else max(0, end - size)
        yield inputs[start : begin + 1], token_ids[begin:end]


@pytest.mark.parametrize("num_tokens", [1, 2, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 250])
def test_rolling_windows_score_every_token_once(llm: LLM, reference: Reference, num_tokens: int) -> None:
    token_ids = encode(llm, LONG)[:num_tokens]
    assert len(token_ids) == num_tokens
    windows = list(plain_windows(token_ids, BOS, MAX_MODEL_LEN - 1))
    expected = [reference(context, scored) for context, scored in windows]
    (found,) = llm.loglikelihood_rolling([token_ids])
    check(found, (sum(e[0] for e in expected), all(e[1] for e in expected)), token_ids)


def test_rolling_takes_texts_one_or_many_and_an_empty_one(llm: LLM) -> None:
    ids = encode(llm, LONG)
    alone = llm.loglikelihood_rolling(LONG)[0]
    assert alone == llm.loglikelihood_rolling([LONG, ids, ""])[1]
    assert alone.token_ids == ids
    assert math.exp(-alone.logprob / alone.num_tokens) > 1
    empty = llm.loglikelihood_rolling([""])[0]
    assert (empty.logprob, empty.num_tokens, empty.is_greedy, empty.token_logprobs.tolist()) == (0.0, 0, True, [])


def test_a_model_without_bos_begins_at_its_eos(folder: Path, tmp_path: Path, reference: Reference) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "nobos")
    settings = copy / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"bos_token": "<s>", ', ""))
    with open_llm(copy) as llm:
        check(llm.loglikelihood_rolling([[9, 10]])[0], reference([EOS], [9, 10]), [9, 10])
        check(llm.loglikelihood([""], [[9, 10]])[0], reference([EOS], [9, 10]), [9, 10])


def test_classification_takes_the_likeliest_choice(llm: LLM) -> None:
    choices = [" one", " two three", " the"]
    prompts = [CONTEXT, "a", [5, 6]]
    found = llm.classify_by_choice(prompts, choices)
    scores = llm.loglikelihood(prompts, [choices] * 3)
    for result, row in zip(found, scores, strict=True):
        values = np.array([score.logprob for score in row])
        expected = np.exp(values - np.logaddexp.reduce(values))
        assert list(result.probabilities) == choices
        np.testing.assert_allclose(list(result.probabilities.values()), expected, rtol=1e-12)
        assert result.label == choices[int(values.argmax())]
    own = llm.classify_by_choice(["a", "b"], [["x", "y"], ["z"]])
    assert (set(own[0].probabilities), own[1].probabilities, own[1].label) == ({"x", "y"}, {"z": 1.0}, "z")


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "text"),
    [
        (["a"], ["b", "c"], ValueError, "2 continuations for 1 prompts: pass one per prompt"),
        (["a"], None, TypeError, "continuations must be texts, token ids, or lists of those; got None (NoneType)"),
        (["a", "b"], ["c", ["d"]], TypeError, "continuations[1] is a list of candidates, others are not"),
        (["a"], [[1.5]], TypeError, "continuations[0][0] must be a text or a list of token ids, got 1.5 (float)"),
        (["a"], [[[1, "x"]]], TypeError, "continuations[0][0] must be a text or a list of token ids, but holds 'x'"),
        (["a", "b"], ["c", ""], RequestError, "continuations[1] adds no token to its prompt"),
        (["a", 5.0], ["c", "d"], RequestError, "prompts[1] is 5.0 (float), not a str"),
        (["a"], [["b", [VOCAB_SIZE]]], RequestError, "continuations[0][1] with its prompt: token id 320 at position 1"),
        ([[5] * 90], [[6] * 7], RequestError, "97 tokens exceed max_model_len 96 by 1"),
        (["a"], ["\ud800"], RequestError, "continuations[0] must be text that can be encoded"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_place_before_any_work(
    llm: LLM, prompts: Any, continuations: Any, error: type[Exception], text: str
) -> None:
    before = llm.stats.num_steps
    with pytest.raises(error) as caught:
        llm.loglikelihood(prompts, continuations)
    assert text in str(caught.value)
    assert llm.stats.num_steps == before


@pytest.mark.parametrize("choices", [[], ["a", ""], ["a", "a"], [["a"], ["b"]], "ab", [["a", 5]]])
def test_choices_that_are_no_set_of_texts_are_refused(llm: LLM, choices: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="choices"):
        llm.classify_by_choice(["x"], choices)


def test_a_pair_that_fails_while_running_is_told_at_the_end(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with open_llm(folder) as llm, pytest.raises(BatchError, match=r"1 of 1 requests failed.*NaN or infinity"):
        llm.loglikelihood(["a"], ["b"])


def test_score_points_to_loglikelihood(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match=r"loglikelihood\(prompts, continuations\)"):
        llm.score("a", "b")
