"""Choices: the table over all token splits against brute force, and outputs that are always one of the texts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedllm import LLM, NotSupportedError, RequestError, SamplingParams, StructuredOutputsParams
from pagedllm.choices import ChoiceState, ChoiceTable, TokenTexts
from pagedllm.engine.scheduler_output import NewRequestData
from pagedllm.sampling.processors import make_mask_processors, token_words
from tests.tiny import EOS, VOCAB_SIZE, save_tiny_model

LETTERS = {i: bytes((i,)) for i in range(256)}
VOCABULARY = {**LETTERS, 256: b"ab", 257: b"abc", 258: b"bc", 259: b"a", 260: "ü".encode(), 261: b"\xbc", 262: b""}


def table(*choices: str, vocabulary: dict[int, bytes] | None = None) -> ChoiceTable:
    return ChoiceTable(choices, TokenTexts(vocabulary or VOCABULARY))


def splits(choices: tuple[str, ...], vocabulary: dict[int, bytes]) -> set[tuple[int, ...]]:
    """Every sequence of tokens that reads as a choice, by brute force."""
    found: set[tuple[int, ...]] = set()
    open_ends: list[tuple[tuple[int, ...], bytes]] = [((), choice.encode()) for choice in choices]
    while open_ends:
        token_ids, rest = open_ends.pop()
        if not rest:
            found.add(token_ids)
        for token_id, text in vocabulary.items():
            if text and rest.startswith(text):
                open_ends.append(((*token_ids, token_id), rest[len(text) :]))
    return found


@pytest.mark.parametrize(
    "choices", [("abc",), ("a", "ab", "abc"), ("abab", "abba", "b"), ("ü", "üb", "y"), ("cab", "cabcab"), ("a", "a")]
)
def test_every_split_of_every_choice_is_a_path_and_nothing_else(choices: tuple[str, ...]) -> None:
    tokens = table(*choices)
    found: set[tuple[int, ...]] = set()
    paths: list[tuple[int, ...]] = [()]
    while paths:
        path = paths.pop()
        prefix = tokens.prefix(path)
        state = tokens.state(prefix)
        following = state.next_tokens
        assert len(set(following)) == len(following)
        assert state.is_complete == (prefix.decode(errors="replace") in choices)
        assert state.is_final == (state.is_complete and not following)
        assert tokens.state(prefix) is state
        if state.is_complete:
            found.add(path)
        paths += [(*path, token_id) for token_id in following]
    assert found == splits(choices, VOCABULARY)


def test_a_path_that_cannot_be_finished_is_not_begun() -> None:
    """Without single bytes "abcd" can be written as ab + cd only, and what begins with "a" or "abc" gets stuck."""
    vocabulary = {0: b"a", 1: b"ab", 2: b"abc", 3: b"cd", 4: b"x"}
    tokens = table("abcd", "x", vocabulary=vocabulary)
    assert sorted(tokens.state(b"").next_tokens) == [1, 4]
    assert tokens.state(b"ab").next_tokens == [3]
    with pytest.raises(ValueError, match=r"^abd$"):
        table("abcd", "abd", vocabulary=vocabulary)


def test_what_leaves_the_choices_has_no_way_on() -> None:
    tokens = table("ab", "cd")
    assert tokens.state(b"q") == tokens.state(b"abc") == ChoiceState([], {}, False, False)


def mask_of(request: NewRequestData, output: list[int]) -> set[int]:
    (mask,) = make_mask_processors(request, 288)
    for token_id in output:
        mask.accept(token_id)
    row = token_words(range(288), 288)
    mask.fill(row)
    mask.accept(7)
    mask.rollback(1)
    again = token_words(range(288), 288)
    mask.fill(again)
    assert row.tolist() == again.tolist()
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_an_end_may_come_at_a_whole_choice_only_even_where_it_is_a_letter() -> None:
    params = SamplingParams(stop_token_ids=[ord("b")])
    request = NewRequestData(1, params, 0, eos_token_ids=(280,), choices=table("ab", "abc"))
    assert mask_of(request, []) == {ord("a"), 259, 256, 257}
    assert mask_of(request, [ord("a")]) == {258}  # "b" would end the output at "a"
    assert mask_of(request, [256]) == {ord("c"), ord("b"), 280}
    ignoring = SamplingParams(ignore_eos=True)
    request = NewRequestData(1, ignoring, 0, eos_token_ids=(280,), choices=table("ab", "abc"))
    assert mask_of(request, [256]) == {ord("c")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("choices") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def open_llm(folder: Path, **fields: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    return LLM(folder, **{**settings, **fields})


def one_of(*choices: str, **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(choice=list(choices)), **fields)


def test_outputs_are_always_one_of_the_choices_and_all_of_them_come(llm: LLM) -> None:
    choices = ("a", "ab", "abc", "the", "the the", "ünï 😀", "\n", " no")
    outputs = llm.generate([[5, i] for i in range(3, 303)], one_of(*choices, temperature=2, seed=1), use_tqdm=False)
    more = llm.generate([[5]] * 600, one_of(*choices, temperature=2), use_tqdm=False)
    assert {output.text for output in [*outputs, *more]} == set(choices)
    assert {output.outputs[0].finish_reason for output in [*outputs, *more]} == {"stop"}


def test_a_choice_that_is_the_beginning_of_none_ends_the_output_without_another_token(llm: LLM) -> None:
    for output in llm.generate([[5, i] for i in range(3, 43)], one_of("ab", "abc", temperature=2, seed=1)):
        completion = output.outputs[0]
        if completion.text == "abc":
            assert completion.stop_reason is None
            assert completion.token_ids[-1] != EOS
        else:
            assert (completion.text, completion.stop_reason, completion.token_ids[-1]) == ("ab", EOS, EOS)


def test_greedy_takes_the_likeliest_of_single_token_choices(llm: LLM) -> None:
    choices = list("abcdefghijkl")
    prompts = [[5, i, 9] for i in range(3, 63)]
    outputs = llm.generate(prompts, one_of(*choices, temperature=0), use_tqdm=False)
    labels = [result.label for result in llm.classify_by_choice(prompts, choices, use_tqdm=False)]
    assert outputs.texts == labels
    assert len(set(labels)) > 3


def test_a_choice_works_without_an_end_token_and_under_a_length(llm: LLM) -> None:
    assert llm.generate("q", one_of("the fox jumps", temperature=0, ignore_eos=True)).texts == ["the fox jumps"]
    cut = llm.generate("q", one_of("the fox jumps", temperature=0, max_tokens=1))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 1)
    assert "the fox jumps".startswith(cut.text)


def test_masks_meet_stops_and_lengths(llm: LLM) -> None:
    stopped = llm.generate("q", one_of("abcd", temperature=0, stop=["c"]))[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("ab", "c")
    at_end = llm.generate("q", one_of("abcd", temperature=0, stop=["cd"]))[0].outputs[0]
    assert (at_end.text, at_end.stop_reason) == ("ab", "cd")
    longer = llm.generate([[5]] * 40, one_of("a", "ab " * 4, temperature=2, min_tokens=4), use_tqdm=False)
    assert set(longer.texts) == {"ab " * 4}
    stuck = llm.generate("q", one_of("ab", temperature=0, min_tokens=20, max_tokens=30), on_error="return")[0]
    assert "choices" in str(stuck.error)
    forbidden = llm.generate("q", one_of("ab", "cd", bad_words=["a"], temperature=0))
    assert forbidden.texts == ["cd"]


def test_equal_choices_are_made_into_a_table_once(folder: Path) -> None:
    rng = random.Random(0)
    choices = ["".join(map(str, word)) for word in product("abc ", repeat=6)] + [str(rng.random()) for _ in range(904)]
    with open_llm(folder) as llm:
        builder = llm._open().builder
        params = [one_of(*choices, seed=i) for i in range(3)]
        texts = llm.generate([[5, 6]] * 30, params * 10, use_tqdm=False).texts
        assert set(texts) <= set(choices)
        assert len(choices) == 5000
        (known,) = builder._choice_tables.values()
        assert builder._choices(params[2].structured_outputs) is known
        for i in range(300):
            builder._choices(StructuredOutputsParams(choice=[str(i)]))
        assert len(builder._choice_tables) == 256


def test_the_draw_follows_the_models_probabilities(llm: LLM) -> None:
    """Of first tokens that a split may begin with, each as often as its share says."""
    params = one_of("ab", "cd", temperature=1, logprobs=-1)
    outputs = llm.generate([[5]] * 400, params, use_tqdm=False)
    first = outputs[0].outputs[0].logprobs[0]
    weights = {i: np.exp(entry.logprob) for i, entry in first.items() if entry.decoded_token in ("a", "ab", "c", "cd")}
    counts = Counter(output.outputs[0].token_ids[0] for output in outputs)
    for token_id, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(counts[token_id] / 400 - share) < 4 * (share * (1 - share) / 400) ** 0.5 + 1e-9


@pytest.mark.parametrize(
    "choice", [None, [], (), "ab", ["a", ""], ["a", 5], [b"a"], {"a": 1}], ids=lambda choice: repr(choice)
)
def test_what_is_no_list_of_texts_is_refused_by_value(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(choice=choice)
    assert (caught.value.code, caught.value.field) == ("invalid_parameter", "structured_outputs")
    assert f"none of them empty, got {choice!r}" in str(caught.value)


@pytest.mark.parametrize("field", ["json", "regex", "grammar", "json_object", "structural_tag"])
def test_what_comes_later_is_refused_by_name(field: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"structured_outputs.{field} is not supported yet: choice=\[...\] is"):
        StructuredOutputsParams(**{field: "x"})


def test_wrong_names_and_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no parameter 'choices': did you mean 'choice'\?"):
        StructuredOutputsParams(choices=["a"])  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"structured_outputs must be None or StructuredOutputsParams.* got \['a'\]"):
        SamplingParams(structured_outputs=["a"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="has no parameter 'regexp': did you mean 'regex'"):
        SamplingParams.from_json({"structured_outputs": {"regexp": "a"}})


def test_an_unpaired_surrogate_and_an_edit_after_construction_are_found_on_use(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs.choice must be text that can be encoded"):
        llm.generate("a", one_of("\ud800"))
    params = one_of("a")
    copy = params.clone()
    params.structured_outputs.choice = []  # type: ignore[union-attr]
    assert copy.structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="non-empty list of texts"):
        llm.generate("a", params)


def test_no_choice_leads_beyond_the_vocabulary(llm: LLM) -> None:
    texts = llm._open().builder.tokenizer.token_texts(VOCAB_SIZE)
    assert set(texts) == set(range(3, VOCAB_SIZE))  # all but the special ones
