"""CASES (a): what sampling parameters mean, each case's whole kind. A15 and A17 are in test_cases_samples.py, A18,
A20 and A21 in test_cases_scores.py, A22 and A25 elsewhere.

User callables make the tiny model say what a case needs, so that nothing here hangs on what random weights prefer.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, RequestError, SamplingParams
from pagedllm.sampling_params import GREEDY_EPSILON
from tests.hostile.harness import (
    GREEDY,
    STARVED,
    answers,
    assert_nothing_left,
    completion,
    copied,
    errors,
    fixed,
    forcing,
    ids,
    open_llm,
    solo,
)
from tests.tiny import BOS, END, EOS, VOCAB_SIZE

SPOKEN = "the quick brown fox, ünï 😀 one two ten the end"
PROMPT = "one two three"
OWN_IDS = [EOS, 2, 7]  # eos ids of the model that `many_eos` is


@pytest.fixture(scope="module")
def many_eos(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same weights with more than one eos id."""
    model = copied(folder, tmp_path_factory.mktemp("eos") / "model", eos_token_id=[2, 7])
    with open_llm(model) as llm:
        yield llm


def encode(llm: LLM, text: str) -> list[int]:
    assert llm._assembly is not None
    return llm._assembly.builder.tokenizer.encode(text, add_special_tokens=False)


def spoken(llm: LLM, **fields: Any) -> SamplingParams:
    """The model says SPOKEN."""
    token_ids = encode(llm, SPOKEN)
    return SamplingParams(
        temperature=0, max_tokens=len(token_ids), ignore_eos=True, logits_processors=[forcing(token_ids)], **fields
    )


def num_tokens_until(llm: LLM, end: int) -> int:
    """How many tokens of SPOKEN hold its first `end` characters."""
    token_ids, num_bytes = encode(llm, SPOKEN), len(SPOKEN[:end].encode())
    assert llm._assembly is not None
    table = llm._assembly.builder.tokenizer._table
    lengths = itertools.accumulate(len(table[token_id]) for token_id in token_ids)
    return next(i for i, length in enumerate(lengths, 1) if length >= num_bytes)


# A1, A2


def test_the_text_these_cases_use_has_tokens_of_every_length(llm: LLM) -> None:
    pieces = [llm._assembly.builder.token_text(i) for i in encode(llm, SPOKEN)]
    assert {len(piece) for piece in pieces} >= {1, 2, 3}
    assert completion(llm.generate(PROMPT, spoken(llm))).text == SPOKEN


@pytest.mark.parametrize("is_included", [False, True])
def test_a1_a2_a_stop_string_cuts_the_decoded_text_at_its_first_occurrence_wherever_tokens_begin(
    llm: LLM, is_included: bool
) -> None:
    stops = sorted({SPOKEN[i : i + n] for n in (1, 2, 3, 7) for i in range(len(SPOKEN) - n + 1)})
    outputs = llm.generate(
        [PROMPT] * len(stops), [spoken(llm, stop=stop, include_stop_str_in_output=is_included) for stop in stops]
    )
    for stop, output in zip(stops, outputs, strict=True):
        begin, found = SPOKEN.find(stop), output.outputs[0]
        assert found.text == SPOKEN[: begin + len(stop) * is_included], stop
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)
        assert len(found.token_ids) == num_tokens_until(llm, begin + len(stop)), stop


def test_a1_of_two_stops_the_earliest_in_the_text_wins(llm: LLM) -> None:
    rng = random.Random(1)
    pairs = []
    for _ in range(60):
        begins = [rng.randrange(len(SPOKEN) - 4) for _ in range(2)]
        pairs.append([SPOKEN[b : b + rng.randint(1, 4)] for b in begins])
    outputs = llm.generate([PROMPT] * len(pairs), [spoken(llm, stop=pair) for pair in pairs])
    for pair, output in zip(pairs, outputs, strict=True):
        # a match is complete with the token that holds its last character; of one token's, the first in the text wins
        ends = {s: num_tokens_until(llm, SPOKEN.find(s) + len(s)) for s in pair}
        candidates = [s for s in pair if ends[s] == min(ends.values())]
        winner = min(candidates, key=lambda s: (SPOKEN.find(s), len(s)))
        assert (output.outputs[0].stop_reason, output.text) == (winner, SPOKEN[: SPOKEN.find(winner)]), pair


def test_a2_stop_text_is_the_same_in_generate_chat_and_files(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    whole = llm.chat(messages, GREEDY)[0]
    for is_included, begin in itertools.product((False, True), (0, 3, 6)):
        stop = whole.text[begin : begin + 2]
        expected = whole.text[: whole.text.find(stop) + 2 * is_included]
        values = {**vars(GREEDY), "stop": stop, "include_stop_str_in_output": is_included}
        params = SamplingParams(**values)
        row = {"stop": stop, "include_stop_str_in_output": is_included, "temperature": 0, "max_tokens": 12}
        (tmp_path / "in").write_text(
            json.dumps({"messages": messages, "sampling_params": {**row, "ignore_eos": True}}) + "\n"
        )
        llm.run_file(tmp_path / "in", tmp_path / "out", if_exists="overwrite")
        texts = [
            llm.generate(whole.prompt_token_ids, params)[0].text,
            llm.chat(messages, params)[0].text,
            json.loads((tmp_path / "out").read_text())["output"],
        ]
        assert texts == [expected] * 3


# A4, A5


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_a4_a_stop_written_as_a_special_tokens_text_stops_there(
    llm: LLM, skip_special_tokens: bool, is_included: bool
) -> None:
    says = [*encode(llm, "one two"), END, *encode(llm, " three")]
    output = llm.generate(
        PROMPT,
        SamplingParams(
            temperature=0,
            max_tokens=len(says),
            stop=["<|end|>", "never"],
            skip_special_tokens=skip_special_tokens,
            include_stop_str_in_output=is_included,
            logits_processors=[forcing(says)],
        ),
    )[0].outputs[0]
    assert output.text == "one two" + "<|end|>" * is_included
    assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", "<|end|>", END)


def test_a4_the_same_text_written_by_ordinary_tokens_stops_too(llm: LLM) -> None:
    says = [i for character in "x<|end|>y" for i in encode(llm, character)]
    assert END not in says
    params = SamplingParams(
        temperature=0, max_tokens=len(says), stop="<|end|>", ignore_eos=True, logits_processors=[forcing(says)]
    )
    assert completion(llm.generate(PROMPT, params)).text == "x"


def test_a4_an_earlier_stop_string_in_the_same_text_still_wins(llm: LLM) -> None:
    says = [*encode(llm, "one two"), END]
    params = SamplingParams(temperature=0, stop=["<|end|>", "wo"], logits_processors=[forcing(says)])
    assert (completion(llm.generate(PROMPT, params)).text, completion(llm.generate(PROMPT, params)).stop_reason) == (
        "one t",
        "wo",
    )


def test_a4_a_special_token_before_min_tokens_does_not_stop(llm: LLM) -> None:
    says = [*encode(llm, "a"), END, *encode(llm, "b"), END]
    params = SamplingParams(temperature=0, stop="<|end|>", min_tokens=3, logits_processors=[forcing(says)])
    assert completion(llm.generate(PROMPT, params)).token_ids == says


def test_a4_a_stop_that_can_never_fire_is_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm.generate(PROMPT, SamplingParams(max_tokens=1, stop="\n<|end|>"))
    assert (
        "stop='\\n<|end|>' holds the special token '<|end|>', which skip_special_tokens=True leaves out" in caplog.text
    )
    caplog.clear()
    llm.generate(PROMPT, SamplingParams(max_tokens=1, stop=["\n<|end|>.", "<|end|>"], skip_special_tokens=False))
    assert "special token" not in caplog.text


@pytest.mark.parametrize("stop", ["", [""], ["", "x"]])
def test_a5_an_empty_stop_string_is_refused_by_name(stop: Any) -> None:
    with pytest.raises(RequestError, match=r"^stop must be a str or a list of str, none of them empty, got "):
        SamplingParams(stop=stop)


def test_a5_no_stop_is_none_an_empty_list_or_an_empty_tuple(llm: LLM) -> None:
    variants = [SamplingParams(**{**vars(GREEDY), "stop": stop}) for stop in ([], None, ())]
    assert answers(llm.generate([PROMPT] * 3, variants)) == answers(llm.generate([PROMPT] * 3, GREEDY))


# A7, A8


@pytest.mark.parametrize("prompt", [PROMPT, [5] * 50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a7_min_tokens_holds_back_every_eos_and_stop_id_and_stop_string(
    many_eos: LLM, prompt: Any, temperature: float
) -> None:
    bias = {**dict.fromkeys((*OWN_IDS, 9), 100.0), **dict.fromkeys(encode(many_eos, "e"), 50.0)}
    params = SamplingParams(
        temperature=temperature, seed=1, logit_bias=bias, stop_token_ids=[9], min_tokens=5, stop="e", max_tokens=9
    )
    output = completion(many_eos.generate([prompt], params))
    assert (output.text, len(output.token_ids), output.stop_reason) == ("eeee", 5, "e")
    params.stop = None
    output = completion(many_eos.generate([prompt], params))
    assert (output.text, len(output.token_ids)) == ("eeeee", 6)
    assert output.stop_reason in (*OWN_IDS, 9)


@pytest.mark.parametrize("min_tokens", range(1, 7))
def test_a7_a_stop_string_is_not_tested_before_min_tokens(llm: LLM, min_tokens: int) -> None:
    says = encode(llm, "x.y.z.")
    assert len(says) == 6
    params = SamplingParams(
        temperature=0, stop=".", min_tokens=min_tokens, ignore_eos=True, logits_processors=[forcing(says)]
    )
    output = completion(llm.generate(PROMPT, params))
    end = min_tokens + min_tokens % 2  # the first dot at or after it
    assert (len(output.token_ids), output.text) == (end, "x.y.z."[: end - 1])


def test_a7_min_tokens_with_ignore_eos_and_no_ending_id_changes_nothing(llm: LLM) -> None:
    with_min = SamplingParams(**{**vars(GREEDY), "min_tokens": 5})
    assert answers(llm.generate(PROMPT, with_min)) == answers(llm.generate(PROMPT, GREEDY))


def test_a7_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^min_tokens must be at most max_tokens \(4\), got 5$"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_a7_min_tokens_beside_an_allow_list_of_ending_ids_only_is_that_requests_error(many_eos: LLM) -> None:
    wrong = SamplingParams(allowed_token_ids=[EOS, 7], min_tokens=2)
    outputs = many_eos.generate([PROMPT, PROMPT], [wrong, GREEDY], on_error="return")
    text = "allowed_token_ids, choices, bad_words and min_tokens together leave no token to choose"
    assert [error and (error.code, error.message, error.index) for error in errors(outputs)] == [
        ("invalid_parameter", text, 0),
        None,
    ]
    assert ids(outputs[1:]) == ids(many_eos.generate(PROMPT, GREEDY))
    assert_nothing_left(many_eos)


@pytest.mark.parametrize("own", OWN_IDS)
def test_a8_ignore_eos_ignores_every_eos_id_whatever_file_it_comes_from(many_eos: LLM, own: int) -> None:
    bias = {own: 100.0}
    params = SamplingParams(temperature=0, logit_bias=bias, ignore_eos=True, max_tokens=32)
    output = completion(many_eos.generate(PROMPT, params))
    assert (output.token_ids, output.finish_reason) == ([own] * 32, "length")
    users = SamplingParams(temperature=0, logit_bias=bias, ignore_eos=True, max_tokens=32, stop_token_ids=[own])
    stopped = completion(many_eos.generate(PROMPT, users))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([own], "stop", own)
    minds = completion(many_eos.generate(PROMPT, SamplingParams(temperature=0, logit_bias=bias)))
    assert (minds.token_ids, minds.stop_reason) == ([own], own)


# A9


def penalized(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The definition, one token at a time."""
    result = []
    for token_id, z in enumerate(logits):
        if token_id in prompt or token_id in output:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        count = output.count(token_id)
        result.append(z - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return result


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.75},
    {"frequency_penalty": -0.5, "presence_penalty": 2.0, "repetition_penalty": 1.25},
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a9_penalties_follow_their_definition_alone_in_a_batch_after_a_prefix_hit_and_after_preemption(
    folder: Path, penalty: dict[str, float], sign: float
) -> None:
    prompt = [20, 21, 22, 20, 30] * 7  # two full blocks
    logits = [sign * (4.0 + ((7 * i) % 13) / 8) for i in range(VOCAB_SIZE)]
    logits[21] = max(logits) + 0.25  # a slight lead for a token of the prompt
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, logits_processors=[fixed(dict(enumerate(logits)))], **penalty
    )
    expected: list[int] = []
    for _ in range(40):
        z = penalized(logits, prompt, expected, params)
        expected.append(z.index(max(z)))
    with open_llm(folder) as llm:
        cold, warm = llm.generate([prompt], params), llm.generate([prompt], params)
        assert warm[0].num_cached_tokens == 32
        batch = llm.generate([[9] * 80, prompt], [GREEDY, params])
    with open_llm(folder, **STARVED) as llm:
        tight = llm.generate([prompt] * 4, params)
        assert llm.stats.num_preemptions > 0
    assert [*ids(cold), *ids(warm), *ids(batch[1:]), *ids(tight)] == [expected] * 7


def test_a9_repetition_sees_the_prompt_and_presence_and_frequency_do_not(llm: LLM) -> None:
    lead = [fixed({21: 1.25, 40: 1.0})]
    for penalty, first in (
        ({"repetition_penalty": 1.5}, 40),
        ({"presence_penalty": 1.0}, 21),
        ({"frequency_penalty": 1.0}, 21),
    ):
        params = SamplingParams(temperature=0, max_tokens=2, logits_processors=lead, ignore_eos=True, **penalty)
        assert ids(llm.generate([[21, 9]], params))[0][0] == first
    negative = [fixed({21: -1.0, 40: -1.25}, base=-9.0)]
    params = SamplingParams(temperature=0, max_tokens=1, logits_processors=negative, repetition_penalty=1.5)
    assert ids(llm.generate([[21, 9]], params)) == [[40]]  # multiplied: -1.5 loses against -1.25


# A10, A11


def test_a10_tiny_temperatures_are_greedy_below_1e_5_and_draw_above(llm: LLM) -> None:
    temperatures = [1e-2, 1e-4, 1e-5, 1e-7, 1e-30, 5e-324, 0.0, 1.0]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, logprobs=0) for t in temperatures]
    outputs = llm.generate([PROMPT] * len(params), params)
    assert answers(outputs) == solo(llm, [PROMPT] * len(params), params)
    greedy = ids(llm.generate(PROMPT, GREEDY))[0]
    assert [ids(outputs)[i] == greedy for i in range(3, 7)] == [True] * 4
    assert all(math.isfinite(output.outputs[0].cumulative_logprob) for output in outputs)
    assert GREEDY_EPSILON == 1e-5


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5])
def test_a10_a_small_temperature_draws_by_its_own_distribution(llm: LLM, temperature: float) -> None:
    gap = float(torch.tensor(8.0) - torch.tensor(8.0 - temperature))  # about one temperature, as float32 can say it
    near = fixed({30: 8.0, 31: 8.0 - gap})
    share = 1 / (1 + math.exp(-gap / temperature))
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=1, logits_processors=[near])
        for seed in range(400)
    ]
    drawn = [token_ids[0] for token_ids in ids(llm.generate([[5]] * 400, params))]
    assert set(drawn) <= {30, 31}
    assert abs(drawn.count(30) / 400 - share) < 4 * math.sqrt(share * (1 - share) / 400) + 1e-9


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -math.inf, -1, -1e-9, 2.1, 10**400])
def test_a10_temperatures_out_of_range_are_refused_at_construction(temperature: float) -> None:
    with pytest.raises(RequestError, match=r"^temperature must be a finite number in \[0, 2\], got "):
        SamplingParams(temperature=temperature)


def test_a11_greedy_and_random_requests_share_a_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=t, seed=i, max_tokens=12, logprobs=1) for i, t in enumerate([0, 1, 0, 0.7])]
    prompts = [PROMPT, PROMPT, "a", "a"]
    assert answers(llm.generate(prompts, params)) == solo(llm, prompts, params)


@pytest.mark.parametrize("tied", [[7, 300], [0, 1], [319, 3, 150], list(range(VOCAB_SIZE))])
def test_a11_a_tie_goes_to_the_lowest_id(llm: LLM, tied: list[int]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logits_processors=[fixed(dict.fromkeys(tied, 2.0))]
    )
    assert ids(llm.generate([[5]], params)) == [[min(tied)]]


# A13, A14


def test_a13_a_seed_holds_whoever_is_in_the_batch_and_wherever_it_stands(folder: Path, llm: LLM) -> None:
    seeded, free = SamplingParams(seed=42, max_tokens=12), SamplingParams(max_tokens=12)
    alone = answers(llm.generate(PROMPT, seeded))
    for place in range(8):
        params = [free] * 8
        params[place] = seeded
        assert answers(llm.generate([PROMPT] * 8, params))[place : place + 1] == alone
    with open_llm(folder, seed=99) as other:
        assert answers(other.generate([PROMPT] * 2, seeded)) == alone * 2
    assert answers(llm.generate(PROMPT, SamplingParams(seed=43, max_tokens=12))) != alone


def test_a13_requests_without_a_seed_differ_from_each_other_and_over_calls(llm: LLM) -> None:
    texts = [text for _ in range(3) for text in llm.generate([PROMPT] * 4, SamplingParams(max_tokens=12)).texts]
    assert len(set(texts)) == 12


def test_a14_a_seeded_stream_goes_on_after_preemption(folder: Path, llm: LLM) -> None:
    params = [SamplingParams(seed=i, temperature=1.2, max_tokens=60, ignore_eos=True, logprobs=0) for i in range(8)]
    roomy = answers(llm.generate([PROMPT] * 8, params))
    with open_llm(folder, **STARVED) as tight:
        outputs = tight.generate([PROMPT] * 8, params)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert answers(outputs) == roomy


# A23


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**31, 2**63, True, "5", 5.0, None])
def test_a23_an_id_out_of_the_vocabulary_is_that_requests_error_by_field_and_id(
    llm: LLM, field: str, wrong: Any
) -> None:
    value = {wrong: 1.0} if field == "logit_bias" else [5, wrong]
    params = SamplingParams()
    setattr(params, field, value)
    outputs = llm.generate([PROMPT] * 3, [GREEDY, params, GREEDY], on_error="return")
    error = outputs[1].error
    assert error is not None
    assert (error.code, error.field, error.index) == ("invalid_parameter", field, 1)
    assert repr(wrong) in error.message
    assert [outputs[0].text, outputs[2].text] == llm.generate([PROMPT] * 2, GREEDY).texts
    assert_nothing_left(llm)


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**31])
def test_a23_a_prompt_with_an_id_out_of_the_vocabulary_is_its_own_error(llm: LLM, wrong: int) -> None:
    outputs = llm.generate([[5, 6], [5, wrong], [], [7]], GREEDY, on_error="return")
    assert [error and error.code for error in errors(outputs)] == [None, "token_out_of_range", "empty_prompt", None]
    assert str(wrong) in str(outputs[1].error)
    assert [outputs[0].text, outputs[3].text] == llm.generate([[5, 6], [7]], GREEDY).texts


def test_a23_bias_and_allow_lists_at_both_ends_of_the_vocabulary_touch_their_own_row_only(llm: LLM) -> None:
    last = VOCAB_SIZE - 1
    params = [
        GREEDY,
        SamplingParams(logit_bias={0: 100, last: -100}, temperature=0, max_tokens=3, ignore_eos=True),
        GREEDY,
        SamplingParams(allowed_token_ids=[last], max_tokens=3),
        SamplingParams(allowed_token_ids=[BOS], max_tokens=3),
        GREEDY,
    ]
    outputs = llm.generate([PROMPT] * 6, params)
    assert ids(outputs)[1] == [0] * 3
    assert (ids(outputs)[3], ids(outputs)[4]) == ([last] * 3, [BOS] * 3)
    assert [ids(outputs)[i] for i in (0, 2, 5)] == ids(llm.generate(PROMPT, GREEDY)) * 3


def test_a23_json_keys_of_a_bias_are_ids(llm: LLM, tmp_path: Path) -> None:
    row = {"prompt": PROMPT, "sampling_params": {"logit_bias": {"65": 100}, "max_tokens": 2, "temperature": 0}}
    wrong = {"prompt": PROMPT, "sampling_params": {"logit_bias": {str(VOCAB_SIZE): 100}}}
    (tmp_path / "in").write_text(json.dumps(row) + "\n" + json.dumps(wrong) + "\n")
    llm.run_file(tmp_path / "in", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    expected = llm.generate(PROMPT, SamplingParams(logit_bias={65: 100}, max_tokens=2, temperature=0))[0].text
    assert (rows[0]["output"], rows[0]["error"]) == (expected, "")
    assert rows[1]["error"].startswith("invalid_parameter: ")
    assert f"logit_bias must be ids in [0, {VOCAB_SIZE}), got {VOCAB_SIZE}" in rows[1]["error"]


# A26


def test_a26_params_are_never_edited_and_rows_never_mix_as_requests_end(llm: LLM) -> None:
    kinds = [
        {"allowed_token_ids": [20, 30, 40]},
        {"logit_bias": {50: 6.0, 51: -100}},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"bad_words": ["e", "one two"], "min_tokens": 4},
        {"stop": ["e", "o"], "stop_token_ids": [60]},
        {"logits_processors": [fixed({70: 1.0, 71: 1.0, 72: 1.0})], "top_k": 3},
        {"logprobs": 2},
        {},
    ]
    rng = random.Random(5)
    params = [
        SamplingParams(seed=i, temperature=rng.choice([0, 0.8, 1.3]), max_tokens=rng.randint(4, 24), **kinds[i % 8])
        for i in range(48)
    ]
    prompts = [f"{i} one two {'three ' * (i % 5)}" for i in range(48)]
    before = copy.deepcopy([{**vars(p), "logits_processors": None} for p in params])
    together = answers(llm.generate(prompts, params))
    assert together == solo(llm, prompts, params)
    assert answers(llm.generate(prompts, params)) == together
    assert [{**vars(p), "logits_processors": None} for p in params] == before


def test_a26_one_params_object_serves_many_prompts_and_calls(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.3, bad_words=["e"], stop=["zz"])
    twin = copy.deepcopy(params)
    first = answers(llm.generate([PROMPT, "a", PROMPT], params))
    assert answers(llm.generate([PROMPT, "a", PROMPT], params)) == first
    assert first[0] == first[2]
    assert params == twin
