"""bad_words, user callables, and how sampling parameters meet: SURFACE's table and its order, on a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.notices import Notices
from pagedllm.request_builder import EncodedPrompt, RequestBuilder
from pagedllm.sampling.processors import AllowedTokens, BadWords, MaskRow, MinTokens, token_words
from tests.hostile.harness import (
    GREEDY,
    STARVED,
    answers,
    assert_nothing_left,
    completion,
    errors,
    fixed,
    forcing,
    ids,
    open_llm,
)
from tests.tiny import EOS, VOCAB_SIZE

PROMPT = "one two three"


def encode(llm: LLM, text: str) -> list[int]:
    assert llm._assembly is not None
    return llm._assembly.builder.tokenizer.encode(text, add_special_tokens=False)


def allowed(row: MaskRow) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


# The one bit mask


def test_a_mask_forbids_what_any_of_its_writers_forbids_and_takes_tokens_back() -> None:
    vocab = 70
    masks = [
        AllowedTokens(range(60, 70), vocab),
        MinTokens(2, [69], vocab),
        BadWords([(61,), (62, 63), (63, 62, 64)], vocab),
    ]

    def row() -> set[int]:
        words = token_words(range(vocab), vocab)
        for mask in masks:
            mask.fill(words)
        return allowed(words)

    every = set(range(60, 70)) - {61}
    assert row() == every - {69}
    for token_id, forbidden in ((63, {69}), (62, {63, 64}), (62, {63}), (65, set())):
        for mask in masks:
            mask.accept(token_id)
        assert row() == every - forbidden
    for mask in masks:
        mask.rollback(2)
    assert row() == every - {63, 64}
    for mask in masks:
        mask.rollback(1)
    assert row() == every - {69}


@pytest.mark.parametrize("last", [0, 30, 31, 32, 63, 64, 95])
def test_bad_words_forbid_their_last_token_at_every_place_in_a_word_of_the_mask(last: int) -> None:
    mask = BadWords([(5, last)], 96)
    mask.accept(5)
    words = token_words(range(96), 96)
    mask.fill(words)
    assert allowed(words) == set(range(96)) - {last}


# bad_words


def flat(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """All that the masks left is equally likely."""
    return torch.where(logits.isneginf(), logits, 0.0)


def contains(token_ids: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(token_ids[i : i + len(part)]) == part for i in range(len(token_ids)))


@pytest.mark.parametrize(
    "words", [["the"], [" the"], ["fox jumps", "e"], ["q"], ["ü"], ["😀x"], [" "], ["the", "the the"]]
)
def test_bad_words_never_come_with_or_without_a_leading_space(llm: LLM, words: list[str]) -> None:
    forms = [form for word in words for form in {word, " " + word.lstrip(), word.lstrip() or word}]
    sequences = [tuple(encode(llm, form)) for form in forms]
    allowed_ids = sorted({token_id for sequence in sequences for token_id in sequence} | set(encode(llm, "x.")))
    params = [
        SamplingParams(
            seed=seed, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed_ids, logits_processors=[flat]
        )
        for seed in range(48)
    ]
    free = ids(llm.generate([PROMPT] * 48, params))
    assert all(any(contains(token_ids, sequence) for token_ids in free) for sequence in sequences if len(sequence) < 4)
    for one in params:
        one.bad_words = words
    held = llm.generate([PROMPT] * 48, params)
    assert not [token_ids for token_ids in ids(held) for sequence in sequences if contains(token_ids, sequence)]
    assert {len(token_ids) for token_ids in ids(held)} == {40}
    assert len(set(held.texts)) > 1


def test_bad_words_look_at_the_output_and_not_at_the_prompt(llm: LLM) -> None:
    first, second = encode(llm, "zq")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={second: 100}, bad_words=["zq"])
    assert ids(llm.generate([[5, first]], params)) == [[second] * 3]
    params.logit_bias = {first: 100, second: 99}
    params.allowed_token_ids = [first, second]
    assert ids(llm.generate([[5]], params)) == [[first] * 3]


class MarkedSpaces:
    """SentencePiece's way: a space is written before the first word, and as part of each later one."""

    special_token_ids: frozenset[int] = frozenset()
    bos_token_id = None
    tokens = ("\n", "_", "_the", "the", "_cat", "c", "a", "t", "_c")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        rest, found = "_" + text.replace(" ", "_"), []
        while rest:
            token = max((t for t in self.tokens if rest.startswith(t)), key=len)
            found.append(self.tokens.index(token))
            rest = rest[len(token) :]
        return found

    def token_to_id(self, token: str) -> int | None:
        return self.tokens.index(token) if token in self.tokens else None


def test_bad_words_know_both_ways_that_a_sentencepiece_vocabulary_writes_a_word() -> None:
    tokenizer: Any = MarkedSpaces()
    builder = RequestBuilder(
        tokenizer,
        vocab_size=9,
        max_position=64,
        max_model_len=64,
        max_logprobs=5,
        eos_token_ids=(),
        rope_variant=lambda num_total_tokens: 0,
        chat_template=None,
        notices=Notices(),
    )
    request = builder.build("0", 0, EncodedPrompt(None, [1]), SamplingParams(bad_words=["the"]), seed=0)
    assert {(2,), (3,)} <= set(request.bad_word_ids)  # "_the" and "the"
    request = builder.build("0", 0, EncodedPrompt(None, [1]), SamplingParams(bad_words=[" cat"]), seed=0)
    assert {(4,), (5, 6, 7)} <= set(request.bad_word_ids)  # "_cat" and "c", "a", "t"


def test_bad_words_hold_back_eos_no_more_than_anything_else(llm: LLM) -> None:
    params = SamplingParams(temperature=0, logit_bias={EOS: 100.0}, bad_words=["</s>"], max_tokens=3)
    assert EOS not in completion(llm.generate(PROMPT, params)).token_ids


def test_a_bad_word_that_no_tokenizer_can_encode_is_refused_by_name(llm: LLM) -> None:
    error = errors(llm.generate([PROMPT], [SamplingParams(bad_words=["a\ud800"])], on_error="return"))[0]
    assert error is not None
    assert (error.code, error.field) == ("invalid_parameter", "bad_words")


def test_masks_that_leave_no_token_are_that_requests_error(llm: LLM) -> None:
    only = encode(llm, "q")
    params = SamplingParams(allowed_token_ids=only, bad_words=["q"], max_tokens=3)
    outputs = llm.generate([PROMPT] * 3, [GREEDY, params, GREEDY], on_error="return")
    assert (
        str(outputs[1].error)
        == "allowed_token_ids, choices, bad_words and min_tokens together leave no token to choose"
    )
    assert [outputs[0].text, outputs[2].text] == llm.generate([PROMPT] * 2, GREEDY).texts
    assert_nothing_left(llm)


# User callables


def test_callables_see_the_output_so_far_and_their_order_is_kept(llm: LLM) -> None:
    seen: list[tuple[int, list[int]]] = []

    def first(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((1, token_ids))
        return torch.zeros_like(logits)

    def second(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((2, token_ids))
        assert (logits.shape, logits.dtype, logits.is_inference()) == ((VOCAB_SIZE,), torch.float32, False)
        logits[40 + len(token_ids)] += 1  # in place
        return logits

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logits_processors=[first, second])
    assert ids(llm.generate(PROMPT, params)) == [[40, 41, 42]]
    assert seen == [(1, []), (2, []), (1, [40]), (2, [40]), (1, [40, 41]), (2, [40, 41])]


def test_callables_come_after_masks_and_bias_and_before_penalties(llm: LLM) -> None:
    found: list[torch.Tensor] = []

    def look(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        found.append(logits.clone())
        return torch.where(logits.isneginf(), logits, 1.0)

    common: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 0}
    params = SamplingParams(
        **common,
        allowed_token_ids=[30, 31, 32],
        logit_bias={32: 7.0},
        presence_penalty=0.5,
        logits_processors=[look],
    )
    biased = completion(llm.generate([[5, 9]], params))
    assert biased.token_ids == [30, 31]  # equal after the callable: the lowest; then the penalty tells them apart
    assert set((~found[0].isneginf()).nonzero().flatten().tolist()) == {30, 31, 32}
    raw = torch.tensor(
        [
            completion(llm.generate([[5, 9]], SamplingParams(**common, allowed_token_ids=[i]))).token_logprobs[0]
            for i in (30, 32)
        ]
    )
    assert float(found[0][32] - found[0][30]) == pytest.approx(float(raw[1] - raw[0]) + 7.0, abs=1e-4)
    alone = SamplingParams(**common, allowed_token_ids=[30])
    assert biased.token_logprobs[0] == completion(llm.generate([[5, 9]], alone)).token_logprobs[0]  # raw


def test_callables_touch_no_other_request(llm: LLM) -> None:
    kept: list[torch.Tensor] = []

    def rude(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        token_ids.append(7)
        logits.zero_()
        kept.append(logits)
        for old in kept[:-1]:
            old.fill_(float("nan"))
        logits[50] = 1
        return logits

    others = [
        SamplingParams(seed=i, max_tokens=10, ignore_eos=True, logprobs=1, repetition_penalty=1.1 + i / 10)
        for i in range(5)
    ]
    expected = answers(llm.generate([PROMPT] * 5, others))
    mine = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logits_processors=[rude])
    outputs = llm.generate([PROMPT] * 6, [*others[:3], mine, *others[3:]])
    assert ids(outputs)[3] == [50] * 10
    assert answers(outputs)[:3] + answers(outputs)[4:] == expected


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        (lambda token_ids, logits: None, "invalid_parameter", "must return a tensor of logits, got NoneType"),
        (
            lambda token_ids, logits: logits[:-1],
            "invalid_parameter",
            f"of shape ({VOCAB_SIZE},), got ({VOCAB_SIZE - 1},)",
        ),
        (
            lambda token_ids, logits: logits[None],
            "invalid_parameter",
            f"of shape ({VOCAB_SIZE},), got (1, {VOCAB_SIZE})",
        ),
        (lambda token_ids, logits: logits.tolist(), "invalid_parameter", "must return a tensor of logits, got list"),
        (lambda token_ids, logits: logits + 0j, "invalid_parameter", "must return real logits, got torch.complex64"),
        (lambda token_ids: token_ids, "invalid_parameter", "raised TypeError"),
        (lambda token_ids, logits: logits / 0 * 0, "non_finite_logits", "logits_processors gave logits with NaN"),
        (lambda token_ids, logits: logits - torch.inf, "non_finite_logits", "-inf for every token"),
    ],
)
def test_a_callable_that_is_wrong_is_its_requests_error(llm: LLM, function: Any, code: str, text: str) -> None:
    params = SamplingParams(max_tokens=4, logits_processors=[lambda token_ids, logits: logits, function])
    outputs = llm.generate([PROMPT] * 3, [GREEDY, params, GREEDY], on_error="return")
    error = outputs[1].error
    assert error is not None
    assert (error.code, error.field, error.index) == (code, "logits_processors", 1)
    assert text in error.message
    assert [outputs[0].text, outputs[2].text] == llm.generate([PROMPT] * 2, GREEDY).texts
    assert_nothing_left(llm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_a_callable_may_give_another_dtype_or_a_tensor_that_wants_gradients(llm: LLM, dtype: torch.dtype) -> None:
    def other(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(VOCAB_SIZE, dtype=dtype)
        result[33] = 2
        return result.requires_grad_() if dtype.is_floating_point else result

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logits_processors=[other])
    assert ids(llm.generate(PROMPT, params)) == [[33, 33]]


def test_a_call_from_a_callable_raises_there(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, logits_processors=[lambda token_ids, logits: llm.generate("x")])
    error = errors(llm.generate([PROMPT], params, on_error="return"))[0]
    assert "no call from inside a call" in str(error)
    assert_nothing_left(llm)


def test_callables_and_bad_words_go_on_after_preemption(folder: Any, llm: LLM) -> None:
    def by_length(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[(sum(token_ids) + len(token_ids)) % VOCAB_SIZE] += 6
        return logits

    params = [
        SamplingParams(
            temperature=0 if i % 2 else 1.0,
            seed=i,
            max_tokens=50,
            ignore_eos=True,
            logits_processors=[by_length],
            bad_words=["e", "th", "o n"],
            min_tokens=30,
        )
        for i in range(8)
    ]
    expected = answers(llm.generate([PROMPT] * 8, params))
    with open_llm(folder, **STARVED) as tight:
        assert answers(tight.generate([PROMPT] * 8, params)) == expected
        assert tight.stats.num_preemptions > 0


# How parameters meet


def test_top_k_above_the_vocabulary_and_top_p_1_are_off(llm: LLM) -> None:
    plain = [SamplingParams(seed=i, max_tokens=9, ignore_eos=True) for i in range(4)]
    off = [
        SamplingParams(seed=i, max_tokens=9, ignore_eos=True, top_k=k, top_p=1, min_p=0)
        for i, k in enumerate([-1, 0, VOCAB_SIZE, 10**12])
    ]
    assert answers(llm.generate([PROMPT] * 4, off)) == answers(llm.generate([PROMPT] * 4, plain))


def test_greedy_ignores_top_p_top_k_and_min_p(llm: LLM) -> None:
    odd = SamplingParams(**{**vars(GREEDY), "top_p": 0.01, "top_k": 7, "min_p": 1.0})
    assert answers(llm.generate(PROMPT, odd)) == answers(llm.generate(PROMPT, GREEDY))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, {30, 31}),
        ({"top_p": 0.5}, {30}),
        ({"top_p": 0.75}, {30, 31}),
        ({"min_p": 0.4}, {30, 31}),
        ({"min_p": 0.6}, {30}),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.2}, {30, 31, 32}),
        ({"top_p": 1e-9}, {30}),
        ({"top_k": 1}, {30}),
    ],
)
def test_min_p_top_k_and_top_p_keep_what_their_definitions_say(llm: LLM, fields: Any, kept: set[int]) -> None:
    weights = {30: 8.0, 31: 4.0, 32: 2.0, 33: 1.0}
    logits = fixed({i: float(np.log(w)) for i, w in weights.items()}, base=-80.0)
    params = [SamplingParams(seed=i, max_tokens=1, logits_processors=[logits], **fields) for i in range(200)]
    assert {token_ids[0] for token_ids in ids(llm.generate([[5]] * 200, params))} == kept


def test_a_bias_is_clamped_to_100_and_an_infinite_one_bans(llm: LLM) -> None:
    for value, clamped in ((1e9, 100.0), (float("inf"), 100.0), (float("-inf"), -100.0)):
        given, same = (SamplingParams(**{**vars(GREEDY), "logit_bias": {40: v, 41: 99.0}}) for v in (value, clamped))
        assert answers(llm.generate(PROMPT, given)) == answers(llm.generate(PROMPT, same))
    tie = SamplingParams(temperature=0, max_tokens=1, logit_bias={40: 1e9, 41: 1e9}, logits_processors=[])
    assert ids(llm.generate(PROMPT, tie))[0][0] in (40, 41)


def test_stop_ids_eos_and_stop_strings_in_one_request_end_by_whichever_comes_first(llm: LLM) -> None:
    says = [*encode(llm, "ab"), 60, *encode(llm, "cd"), EOS, *encode(llm, "ef")]
    for stops, stop_ids, ignore_eos, reason in (
        (["d"], [60], False, 60),
        (["b"], [60], False, "b"),
        (["d"], [], False, "d"),
        (["f"], [], False, EOS),
        (["f"], [], True, "f"),
        (["f"], [EOS], True, EOS),
        (["zz"], [], True, None),
    ):
        params = SamplingParams(
            temperature=0,
            max_tokens=len(says),
            stop=stops,
            stop_token_ids=stop_ids,
            ignore_eos=ignore_eos,
            logits_processors=[forcing(says)],
        )
        assert completion(llm.generate(PROMPT, params)).stop_reason == reason
