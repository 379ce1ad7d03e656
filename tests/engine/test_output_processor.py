"""How outputs end, and what their text is: CASES A1, A2, A7, A8 without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedllm.engine.output_processor import OutputProcessor, StopStringFinder
from pagedllm.request import Request, TokenLogprobs
from tests.engine.fakes import make_request


@dataclass
class WordDetokenizer:
    """Token i reads as words[i]. A stream holds back as many characters as `held` says."""

    words: Sequence[str]
    held: int = 0
    num_streams: int = 0
    calls: list[str] = field(default_factory=list)

    def decode(self, request: Request) -> str:
        self.calls.append("decode")
        return "".join(self.words[i] for i in request.text_token_ids)

    def stream(self, request: Request) -> WordStream:
        self.calls.append("stream")
        return WordStream(self)


@dataclass
class WordStream:
    detokenizer: WordDetokenizer
    rest: str = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self.rest + "".join(self.detokenizer.words[i] for i in token_ids)
        cut = max(0, len(text) - self.detokenizer.held)
        self.rest = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        text, self.rest = self.rest, ""
        return text


def generate(
    words: Sequence[str],
    token_ids: Sequence[int] | None = None,
    *,
    held: int = 0,
    max_tokens: int = 100,
    **params: object,
) -> Request:
    """Feeds the tokens (all words in order, if not given) until the request ends."""
    eos_token_ids = params.pop("eos_token_ids", ())
    request = make_request("r", [0] * 50, max_tokens, eos_token_ids=eos_token_ids, **params)  # type: ignore[arg-type]
    processor = OutputProcessor(WordDetokenizer(words, held))
    for token_id in range(len(words)) if token_ids is None else token_ids:
        if processor.append(request, token_id, None):
            processor.close(request)
            assert processor._ends == {}
            break
    return request


def ending(request: Request) -> tuple[str | None, str | int | None, str | None, int]:
    return request.finish_reason, request.stop_reason, request.text, request.num_output_tokens


WORDS = ["Once", " upon", " a ti", "me, the", "re was"]


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("upon", "Once ", 2),
        ("po", "Once u", 2),  # wholly inside a token
        ("on a", "Once up", 3),  # from the middle of one into the middle of the next
        ("n a time, t", "Once upo", 4),  # over three tokens
        ("O", "", 1),
        ("was", "Once upon a time, there ", 5),
    ],
)
def test_a_stop_string_ends_the_text_just_before_it_wherever_tokens_begin(
    stop: str, text: str, num_tokens: int, held: int
) -> None:
    request = generate(WORDS, held=held, stop=stop, max_tokens=5)
    assert ending(request)[:3] == ("stop", stop, text)
    assert request.num_output_tokens >= num_tokens  # held back text is tested a token later, or at the end
    if held == 0:
        assert request.num_output_tokens == num_tokens
    included = generate(WORDS, held=held, stop=[stop], max_tokens=5, include_stop_str_in_output=True)
    assert ending(included)[:3] == ("stop", stop, text + stop)


def test_the_token_that_holds_the_stop_stays() -> None:
    assert generate(WORDS, stop="ti").output_token_ids == [0, 1, 2]


def test_of_two_stops_in_one_step_the_earlier_in_the_text_wins() -> None:
    for stops in (["d", "b"], ["b", "d"]):
        assert ending(generate(["abcde"], stop=stops)) == ("stop", "b", "a", 1)
    assert ending(generate(["abcde"], stop=["bcd", "bc"])) == ("stop", "bc", "a", 1)
    assert ending(generate(["abcde"], stop=["cd", "bcd"])) == ("stop", "bcd", "a", 1)


def test_a_stop_that_never_comes_leaves_the_text_whole() -> None:
    assert ending(generate(WORDS, stop=["xyz"], max_tokens=5, held=2)) == ("length", None, "".join(WORDS), 5)
    assert ending(generate(WORDS, stop=[], max_tokens=5)) == ("length", None, "".join(WORDS), 5)


def test_half_a_stop_at_the_end_is_text() -> None:
    assert ending(generate(["ab", "ca"], stop="cab", max_tokens=2)) == ("length", None, "abca", 2)


def test_text_that_was_held_back_is_tested_when_the_length_ends_the_output() -> None:
    assert ending(generate(["ab", "cd"], stop="cd", max_tokens=2, held=2)) == ("stop", "cd", "ab", 2)


@pytest.mark.parametrize(("is_included", "text"), [(False, "ab"), (True, "ab<eos>")])
def test_the_text_of_an_ending_token_is_in_the_output_only_on_request(is_included: bool, text: str) -> None:
    words = ["a", "b", "<eos>"]
    for stop in ((), ("xyz",)):
        for ends in ({"eos_token_ids": (2,)}, {"stop_token_ids": [2]}):
            request = generate(words, stop=stop, include_stop_str_in_output=is_included, **ends)
            assert ending(request) == ("stop", 2, text, 3)
            assert request.output_token_ids == [0, 1, 2]


def test_a_stop_string_in_held_back_text_comes_before_the_token_that_ends_the_output() -> None:
    request = generate(["a", "bc", "<eos>"], stop="c", held=1, eos_token_ids=(2,))
    assert ending(request) == ("stop", "c", "ab", 3)


def test_every_eos_id_ends_and_is_named() -> None:
    words = ["a", "b", "<2>", "<3>"]
    assert ending(generate(words, [0, 3, 1], eos_token_ids=(2, 3))) == ("stop", 3, "a", 2)
    assert ending(generate(words, [0, 2, 1], eos_token_ids=(2, 3))) == ("stop", 2, "a", 2)


def test_ignore_eos_ignores_every_eos_id_but_not_the_users_own_stop_ids() -> None:
    words = ["a", "b", "<2>", "<7>"]
    request = generate(words, [2, 3] * 16, eos_token_ids=(2, 3), ignore_eos=True, max_tokens=32)
    assert (request.finish_reason, request.num_output_tokens) == ("length", 32)
    request = generate(words, [2, 3] * 16, eos_token_ids=(2, 3), ignore_eos=True, stop_token_ids=[3], max_tokens=32)
    assert ending(request) == ("stop", 3, "<2>", 2)


def test_min_tokens_holds_back_every_way_of_ending_and_counts_output_only() -> None:
    words = ["x", "<1>", "<2>", "<3>"]
    ends = {"eos_token_ids": (1, 2), "stop_token_ids": [3], "stop": ["x"], "min_tokens": 5}
    for token_id, reason in ((1, 1), (2, 2), (3, 3), (0, "x")):
        request = generate(words, [token_id] * 20, **ends)
        assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == ("stop", reason, 5)
    assert generate(words, [0] * 20, **ends).text == "xxxx"


def test_a_stop_string_before_min_tokens_is_not_found_later() -> None:
    request = generate(["x", "a", "b", "x"], [0, 1, 2, 1, 3], stop="x", min_tokens=2)
    assert ending(request) == ("stop", "x", "xaba", 5)
    request = generate(["x", "y", "z"], [0, 1, 2], stop=["xy", "yz"], min_tokens=2)
    assert ending(request) == ("stop", "xy", "", 2)  # it ends in the second token


def test_the_length_ends_at_its_token() -> None:
    assert ending(generate(["a"], [0] * 9, max_tokens=3)) == ("length", None, "aaa", 3)


def test_without_detokenizing_there_is_no_text() -> None:
    assert ending(generate(["a"], [0] * 9, max_tokens=3, detokenize=False)) == ("length", None, None, 3)


def test_text_is_decoded_once_and_streamed_only_for_stop_strings() -> None:
    for stop, calls in ((None, ["decode"]), ("never", ["stream"])):
        detokenizer = WordDetokenizer(["a"])
        processor = OutputProcessor(detokenizer)
        request = make_request("r", [0], 4, stop=stop)
        while not processor.append(request, 0, None):
            pass
        processor.close(request)
        assert detokenizer.calls == calls
        assert request.text == "aaaa"


def test_an_aborted_request_gets_the_text_it_has() -> None:
    for stop in (None, "never"):
        processor = OutputProcessor(WordDetokenizer(["ab"], held=1))
        request = make_request("r", [0], 9, stop=stop)
        for _ in range(3):
            processor.append(request, 0, None)
        request.finish_reason = "abort"
        processor.close(request)
        assert request.text == "ababab"


def test_logprobs_are_kept_for_every_token_and_summed() -> None:
    processor = OutputProcessor(WordDetokenizer(["a"]))
    request = make_request("r", [0], 3, logprobs=0)
    entries = [TokenLogprobs(np.array([0], np.int32), np.array([-x], np.float32), 1) for x in (0.5, 0.25, 2.0)]
    for entry in entries:
        processor.append(request, 0, entry)
    assert request.logprobs == entries
    assert request.cumulative_logprob == -2.75


def naive_end(pieces: list[str], stops: list[str], num_untested: int) -> tuple[int, str] | None:
    """Where the text is cut, and by what, looking at the whole text after each piece."""
    text, floor = "", 0
    for number, piece in enumerate(pieces):
        text += piece
        if number < num_untested:
            floor = len(text)
            continue
        matches = [
            (begin, len(stop), stop)
            for stop in stops
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > floor
        ]
        if matches:
            begin, _, stop = min(matches)
            return begin, stop
    return None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    num_untested=st.integers(0, 4),
    is_included=st.booleans(),
)
def test_the_finder_agrees_with_looking_at_the_whole_text(
    pieces: list[str], stops: list[str], num_untested: int, is_included: bool
) -> None:
    stream = WordStream(WordDetokenizer(pieces))
    finder = StopStringFinder(tuple(stops), is_included, stream)
    found = None
    for number in range(len(pieces)):
        found = finder.push(number, is_tested=number >= num_untested)
        if found is not None:
            break
    expected = naive_end(pieces, stops, num_untested)
    assert found == (None if expected is None else expected[1])
    if expected is None:
        assert finder.text == "".join(pieces)
    else:
        begin, stop = expected
        assert finder.text == "".join(pieces)[: begin + (len(stop) if is_included else 0)]
