"""BeamSearchParams: ranges by field and value, and the names that other libraries have."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from pagedllm import BeamSearchParams, NotSupportedError, RequestError


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("beam_width", 0, "beam_width must be an int >= 1, got 0"),
        ("beam_width", True, "beam_width must be an int >= 1, got True"),
        ("beam_width", 2.0, "beam_width must be an int >= 1, got 2.0"),
        ("max_tokens", 0, "max_tokens must be None or an int >= 1, got 0"),
        ("length_penalty", math.nan, "length_penalty must be a finite number in [-20, 20], got nan"),
        ("length_penalty", 21, "length_penalty must be a finite number in [-20, 20], got 21"),
        ("length_penalty", "1", "length_penalty must be a finite number in [-20, 20], got '1'"),
        ("early_stopping", "always", "early_stopping must be True, False or 'never', got 'always'"),
        ("early_stopping", 1, "early_stopping must be True, False or 'never', got 1"),
        ("ignore_eos", 1, "ignore_eos must be a bool, got 1"),
        ("stop_token_ids", [1.5], "stop_token_ids must be None or a list of ints, got [1.5]"),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field, value, text):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, field: value})
    assert (str(caught.value), caught.value.code, caught.value.field) == (text, "invalid_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", None), ("length_penalty", 0), ("length_penalty", -2.5), ("early_stopping", "never"),
     ("stop_token_ids", None), ("stop_token_ids", (3, 4))],
)  # fmt: skip
def test_edges_are_accepted(field, value):
    BeamSearchParams(**{"beam_width": 1, field: value})


def test_assigned_values_are_checked_by_verify():
    params = BeamSearchParams(2)
    params.beam_width = 0
    with pytest.raises(RequestError, match="beam_width must be an int >= 1, got 0"):
        params.verify()


def test_the_names_of_other_libraries_are_answered():
    with pytest.raises(TypeError, match="BeamSearchParams has no parameter 'num_beams': use beam_width"):
        BeamSearchParams(2, num_beams=3)
    with pytest.raises(NotSupportedError, match=r"temperature=0\.5 is not supported: .*beam search does not sample"):
        BeamSearchParams(2, temperature=0.5)


def test_params_pickle_and_copy():
    params = BeamSearchParams(3, length_penalty=0.5, stop_token_ids=[4])
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
