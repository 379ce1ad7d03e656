"""Streams: the pieces joined are the whole text, none holds half a character, the seam to the prompt reads right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.detokenizer import TokenBytes
from pagedllm.request import Request
from pagedllm.sampling_params import SamplingParams
from pagedllm.tokenizer import Tokenizer
from tests.model.gguf_files import CONTROL, byte_level_vocabulary, sentencepiece_vocabulary, write_model

PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁world", "▁Hello", "é", "\ufffd"]
CHARACTERS = [
    "😀", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "e\u0301", "a\u0300\u0301", "你好", "हिन्दी",
    "\ufffd", "x\ufffdy", "é", "\U0010ffff", "\x00", " a  b\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, id = byte; 257 is special."""
    return Tokenizer.from_folder(
        write_model(tmp_path_factory.mktemp("b") / "b.gguf", vocabulary=byte_level_vocabulary())
    )


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """0 to 2 are <unk>, <s>, </s>; 3 + byte; then PIECES from 259, then <|end|>. A space is put before each text."""
    vocabulary = sentencepiece_vocabulary(PIECES, {"<|end|>": CONTROL})
    return Tokenizer.from_folder(write_model(tmp_path_factory.mktemp("s") / "s.gguf", vocabulary=vocabulary))


def piece(text: str) -> int:
    return 259 + PIECES.index(text)


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    """One push a token; the last item is what `finish` gave."""
    stream = tokenizer.detokenizer.open(prompt, skip)
    return [*(stream.push([token]) for token in output), stream.finish()]


@pytest.mark.parametrize("text", CHARACTERS)
def test_no_piece_is_half_a_character(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    data = text.encode()
    for tokenizer, first, prompt in ((byte_level, 0, [97]), (sentencepiece, 3, [1, piece("a")])):
        pieces = streamed(tokenizer, prompt, [first + byte for byte in data])
        assert "".join(pieces) == text
        assert [p for p in pieces if p] == list(text)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_tail_appears_once_and_at_the_end_only(byte_level: Tokenizer, cut: int) -> None:
    pieces = streamed(byte_level, [97], [98, *"😀".encode()[:cut]])
    assert pieces == ["b", *[""] * cut, "\ufffd"]


def test_a_broken_character_costs_no_valid_one(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "😀".encode()[:4] + "é".encode()[:1]]
    assert streamed(sentencepiece, [1, piece("a")], ids) == ["", "", "", "😀", "", "\ufffd"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_output_completes_the_prompts_last_character(byte_level: Tokenizer, cut: int) -> None:
    data = list("😀".encode())
    assert "".join(streamed(byte_level, [97, *data[:cut]], [*data[cut:], 98])) == "😀b"


def test_an_output_that_does_not_complete_it_starts_behind_it(byte_level: Tokenizer) -> None:
    prompt = [97, *"😀".encode()[:3]]
    assert byte_level.decode(prompt) == "a\ufffd"
    assert "".join(streamed(byte_level, prompt, [98])) == "b"
    assert "".join(streamed(byte_level, prompt, [])) == ""


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (["▁Hello"], ["▁world"], " world"),
        (["▁Hello", "▁"], ["a"], "a"),
        (["▁Hello"], ["a", "▁b"], "a b"),
        ([], ["▁world", "▁a"], "world a"),
        (["▁"], ["▁a"], " a"),
        ([], ["▁", "▁", "a"], " a"),
        (["▁Hello"], [], ""),
    ],
)
def test_the_space_at_the_seam_is_neither_lost_nor_doubled(
    sentencepiece: Tokenizer, prompt: list[str], output: list[str], text: str
) -> None:
    before, after = [1, *map(piece, prompt)], list(map(piece, output))
    assert "".join(streamed(sentencepiece, before, after)) == text
    assert sentencepiece.decode(before) + text == sentencepiece.decode(before + after)


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    assert streamed(byte_level, [], [97, 257, 98], skip=True) == ["a", "", "b", ""]
    assert streamed(byte_level, [], [97, 257, 98], skip=False) == ["a", "<|endoftext|>", "b", ""]


def test_a_byte_level_text_equals_the_librarys(byte_level: Tokenizer) -> None:
    rng = random.Random(5)
    characters = [byte for text in CHARACTERS for byte in text.encode()]
    for _ in range(2000):
        ids = [rng.choice(characters) if rng.random() < 0.7 else rng.randrange(259) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            assert byte_level.decode(ids, skip_special_tokens=skip) == byte_level._backend.decode(
                ids, skip_special_tokens=skip
            )


def test_a_sentencepiece_text_of_whole_characters_equals_the_librarys(sentencepiece: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(2000):
        ids: list[int] = []
        for _ in range(rng.randrange(8)):
            if rng.random() < 0.4:
                ids += [3 + byte for byte in rng.choice(CHARACTERS).encode()]
            else:
                ids.append(rng.choice([0, 1, 2, *range(259, 270)]))
        for skip in (True, False):
            assert sentencepiece.decode(ids, skip_special_tokens=skip) == sentencepiece._backend.decode(
                ids, skip_special_tokens=skip
            )


IDS = st.lists(st.integers(0, 271))


@settings(max_examples=300, deadline=None)
@given(IDS, st.lists(IDS))
def test_pieces_joined_are_the_whole_text_however_the_ids_come(
    byte_level: Tokenizer, sentencepiece: Tokenizer, prompt: list[int], chunks: list[list[int]]
) -> None:
    output = [token for chunk in chunks for token in chunk]
    for tokenizer in (byte_level, sentencepiece):
        request = Request("r", prompt + output, len(prompt), SamplingParams(), 9)
        stream = tokenizer.detokenizer.stream(request)
        text = "".join(map(stream.push, chunks)) + stream.finish()
        assert text == tokenizer.detokenizer.decode(request)
        assert text == "".join(streamed(tokenizer, prompt, output))


def test_the_text_ends_before_the_token_that_ended_it(byte_level: Tokenizer) -> None:
    request = Request("r", [97, 98, 99], 1, SamplingParams(), 9, stop_reason=99)
    assert byte_level.detokenizer.decode(request) == "b"


def test_a_push_looks_up_its_own_tokens_only(byte_level: Tokenizer) -> None:
    class Counting(TokenBytes):
        count = 0

        def __getitem__(self, token_id: int) -> bytes:
            self.count += 1
            return super().__getitem__(token_id)

    from pagedllm.detokenizer import TextStream

    table = Counting(byte_level._backend, "here")
    stream = TextStream(table, frozenset(), [97] * 5000)
    assert table.count <= 10  # of a prompt only the tokens at its end
    for _ in range(100):
        stream.push([98])
    assert table.count <= 110


def test_a_gguf_without_prefix_space_keeps_every_space(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(PIECES) | {"add_space_prefix": False}
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "g.gguf", vocabulary=vocabulary))
    assert tokenizer.encode(" a")[1:] == [piece("▁a")]
    assert tokenizer.decode([piece("▁a")]) == " a"
