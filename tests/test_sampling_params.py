"""Each field of SamplingParams: what is accepted, and what the error says."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest

from pagedllm import RequestError, SamplingParams

NEUTRAL = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "max_tokens": 256,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "bad_words": (),
    "allowed_token_ids": None,
    "structured_outputs": None,
    "logits_processors": (),
}


def test_defaults_are_neutral_and_max_tokens_256():
    assert dataclasses.asdict(SamplingParams()) == NEUTRAL


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", 2.1, "temperature must be a finite number in [0, 2], got 2.1"),
        ("temperature", -1, "temperature must be a finite number in [0, 2], got -1"),
        ("temperature", math.nan, "temperature must be a finite number in [0, 2], got nan"),
        ("temperature", math.inf, "temperature must be a finite number in [0, 2], got inf"),
        ("temperature", 10**400, "temperature must be a finite number in [0, 2], got 1000"),
        ("temperature", "1", "temperature must be a finite number in [0, 2], got '1'"),
        ("temperature", True, "temperature must be a finite number in [0, 2], got True"),
        ("temperature", None, "temperature must be a finite number in [0, 2], got None"),
        ("top_p", 0, "top_p must be in (0, 1], got 0"),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5"),
        ("min_p", -0.1, "min_p must be in [0, 1], got -0.1"),
        ("top_k", -2, "top_k must be 0 or -1 (off) or an int >= 1, got -2"),
        ("top_k", 1.0, "top_k must be 0 or -1 (off) or an int >= 1, got 1.0"),
        ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2], got 2.5"),
        ("frequency_penalty", -2.5, "frequency_penalty must be in [-2, 2], got -2.5"),
        ("repetition_penalty", 0, "repetition_penalty must be a finite number > 0 (1e-30 to 1e30), got 0"),
        ("seed", 1.5, "seed must be None or an int, got 1.5"),
        ("max_tokens", -1, "max_tokens must be None or an int >= 0, got -1"),
        ("max_tokens", True, "max_tokens must be None or an int >= 0, got True"),
        ("min_tokens", 257, "min_tokens must be at most max_tokens (256), got 257"),
        ("stop", "", "stop must be a str or a list of str, none of them empty, got ''"),
        ("stop", [""], "stop must be a str or a list of str, none of them empty, got ['']"),
        ("stop", ["", "x"], "stop must be a str or a list of str, none of them empty, got ['', 'x']"),
        ("stop", [1], "stop must be a str or a list of str, none of them empty, got [1]"),
        ("stop", 5, "stop must be a str or a list of str, got 5"),
        ("stop_token_ids", [1.5], "stop_token_ids must be None or a list of ints, got [1.5]"),
        ("stop_token_ids", [True], "stop_token_ids must be None or a list of ints, got [True]"),
        ("ignore_eos", 1, "ignore_eos must be a bool, got 1"),
        ("logprobs", -2, "logprobs must be None, an int >= 0, or -1 (the whole vocabulary), got -2"),
        ("logit_bias", [1], "logit_bias must be None or a dict of id to number, got [1]"),
        ("logit_bias", {"5": 1.0}, "logit_bias must be a dict of int id to number, got {'5': 1.0}"),
        ("logit_bias", {5: math.nan}, "logit_bias must be a dict of int id to number, got {5: nan}"),
        ("allowed_token_ids", [], "allowed_token_ids must be None or a non-empty list of ints, got []"),
        ("bad_words", [""], "bad_words must be None or a list of str, none of them empty, got ['']"),
        ("bad_words", "word", "bad_words must be None or a list of str, none of them empty, got 'word'"),
        (
            "logits_processors",
            [1],
            "logits_processors must be None or a list of callables f(token_ids, logits), got [1]",
        ),
        ("logits_processors", len, "logits_processors must be None or a list of callables f(token_ids, logits), got <"),
        ("n", 0, "n must be an int >= 1, got 0"),
        ("n", True, "n must be an int >= 1, got True"),
        ("n", 2.0, "n must be an int >= 1, got 2.0"),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field, value, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(text)
    assert (caught.value.code, caught.value.field) == ("invalid_parameter", field)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 5e-324),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", 10**9),
        ("top_k", np.int64(5)),
        ("seed", -1),
        ("seed", 2**80),
        ("max_tokens", None),
        ("max_tokens", 0),
        ("stop", None),
        ("stop", []),
        ("stop", "x"),
        ("stop_token_ids", None),
        ("logprobs", -1),
        ("logprobs", 0),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {}),
        ("bad_words", ["x", " y"]),
        ("logits_processors", [max]),
    ],
)
def test_accepted_values(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_stop_strings_need_detokenize():
    with pytest.raises(RequestError, match="detokenize must be True where stop strings are given, got False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("temperature", [0, 1e-6, 9.9e-6, 5e-324])
def test_temperatures_under_1e_5_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy


def test_1e_5_itself_samples():
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temprature", "SamplingParams has no parameter 'temprature': did you mean 'temperature'?"),
        ("max_new_tokens", "SamplingParams has no parameter 'max_new_tokens': use max_tokens"),
        ("guided_decoding", "SamplingParams has no parameter 'guided_decoding': use structured_outputs"),
        ("best_of", "SamplingParams has no parameter 'best_of': use n"),
        ("use_beam_search", "'use_beam_search': use llm.beam_search(prompts, BeamSearchParams(...))"),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_the_right_name(name, text):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})
    assert text in str(caught.value)


def test_signature_shows_the_fields():
    assert list(inspect.signature(SamplingParams).parameters) == list(NEUTRAL)


def test_assigned_values_are_checked_by_verify():
    params = SamplingParams()
    params.top_p = 2.0
    with pytest.raises(RequestError, match=r"top_p must be in \(0, 1\], got 2.0"):
        params.verify()


def test_clone_is_independent():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3])
    twin = params.clone()
    twin.stop.append("b")
    twin.logit_bias[4] = 5.0
    twin.stop_token_ids.append(6)
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3])


def test_params_pickle_and_copy():
    params = SamplingParams(top_p=0.5, stop=["x"])
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("stop_token_ids", [10], "stop_token_ids must be ids in [0, 10), got 10"),
        ("allowed_token_ids", [3, -1], "allowed_token_ids must be ids in [0, 10), got -1"),
        ("logit_bias", {2**31: 1.0}, "logit_bias must be ids in [0, 10), got 2147483648"),
        ("logprobs", 6, "logprobs must be at most max_logprobs (5), or -1, got 6"),
    ],
)
def test_ids_must_be_in_the_vocabulary_and_logprobs_within_the_limit(field, value, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value}).verify_for_model(vocab_size=10, max_logprobs=5)
    assert (str(caught.value), caught.value.field) == (text, field)


def test_whole_vocabulary_logprobs_ignore_the_limit():
    SamplingParams(logprobs=-1).verify_for_model(vocab_size=10, max_logprobs=0)


def test_json_has_digits_as_keys_of_logit_bias():
    assert SamplingParams.from_json({"logit_bias": {"5": 2}}).logit_bias == {5: 2}


def test_json_values_come_before_the_defaults():
    assert SamplingParams.from_json({"top_k": 3}, {"top_k": 1, "top_p": 0.5}) == SamplingParams(top_k=3, top_p=0.5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temprature", "sampling_params has no parameter 'temprature': did you mean 'temperature'?"),
        ("max_completion_tokens", "sampling_params has no parameter 'max_completion_tokens': use max_tokens"),
    ],
)
def test_an_unknown_key_of_a_row_is_an_invalid_parameter_with_the_right_name(name, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_json({name: 1})
    assert (caught.value.code, str(caught.value)) == ("invalid_parameter", text)
