"""ChoiceTable: which tokens may come next so that an output ends up as one of a set of texts.

Every way to cut a text into tokens is allowed, not the tokenizer's own alone: a prefix of bytes is the whole state, and
a token may follow if some choice begins with the prefix and the token's bytes. Special tokens are no text. Prefixes are
looked up in the sorted choices, so 5,000 of them cost their bytes, and what was worked out for a prefix is kept.

    choices  yes, yesterday, no        after "ye":  "s", "st", "ster", ...     after "yes":  the end, "t", "terday", ...

Plain Python: the sampler's mask and the engine's end both read it. Made once for a list of choices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ABOVE = b"\xff"  # stands in no text: sorts behind everything that begins with a prefix


class TokenTexts:
    """The bytes of every token that is text, and the tokens of bytes."""

    def __init__(self, texts: Mapping[int, bytes]) -> None:
        """texts: by token id; empty ones are left out."""
        self.of_token = {token_id: text for token_id, text in texts.items() if text}
        tokens: dict[bytes, list[int]] = {}
        for token_id, text in self.of_token.items():
            tokens.setdefault(text, []).append(token_id)
        self.tokens = tokens
        self.longest = max(map(len, tokens), default=0)


def words_of(token_ids: Iterable[int]) -> dict[int, int]:
    """The words of a mask that are not 0: token 32 j + i is bit i of word j."""
    words: dict[int, int] = {}
    for token_id in token_ids:
        words[token_id >> 5] = words.get(token_id >> 5, 0) | 1 << (token_id & 31)
    return words


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """Of a prefix."""

    next_tokens: list[int]  # that may follow; none where no choice begins like that or none goes on
    words: dict[int, int]  # the same as bits, by `words_of`
    is_complete: bool  # it is a choice
    is_final: bool  # and the beginning of no other


class ChoiceTable:
    def __init__(self, choices: Sequence[str], texts: TokenTexts) -> None:
        """Raises ValueError naming a choice that the vocabulary cannot write."""
        self._texts = texts
        self._choices = sorted({choice.encode() for choice in choices})
        self.longest = max(map(len, self._choices))
        has_all_bytes = all(bytes((byte,)) in texts.tokens for byte in set(b"".join(self._choices)))
        self._writable = None if has_all_bytes else self._find_writable()
        self._states: dict[bytes, ChoiceState] = {}

    def prefix(self, token_ids: Sequence[int]) -> bytes:
        """What these tokens read as; those that are no text read as nothing."""
        return b"".join([self._texts.of_token.get(token_id, b"") for token_id in token_ids])

    def state(self, prefix: bytes) -> ChoiceState:
        """What is known of a prefix, worked out once."""
        state = self._states.get(prefix)
        if state is None:
            begin, end = self._range(prefix)
            is_complete = begin < end and len(self._choices[begin]) == len(prefix)
            following = self._find_next(prefix)
            state = ChoiceState(following, words_of(following), is_complete, is_complete and end - begin == 1)
            self._states[prefix] = state
        return state

    def _range(self, prefix: bytes) -> tuple[int, int]:
        """Where the choices stand that begin like that."""
        begin = bisect_left(self._choices, prefix)
        return begin, bisect_left(self._choices, prefix + ABOVE, begin)

    def _find_next(self, prefix: bytes) -> list[int]:
        choices, tokens, start = self._choices, self._texts.tokens, len(prefix)
        limit = start + self._texts.longest
        found: list[bytes] = []
        ranges = [(*self._range(prefix), start)]
        while ranges:
            begin, end, depth = ranges.pop()  # these share their first `depth` bytes
            if begin < end and len(choices[begin]) == depth:
                begin += 1
            while begin < end:
                text = choices[begin]
                if end - begin == 1:
                    found += [text[:stop] for stop in range(depth + 1, min(len(text), limit) + 1)]
                    break
                shared = text[: depth + 1]
                following = bisect_left(choices, shared + ABOVE, begin, end)
                found.append(shared)
                if depth + 1 < limit:
                    ranges.append((begin, following, depth + 1))
                begin = following
        if self._writable is not None:
            found = [text for text in found if text in self._writable]
        return [token_id for text in found for token_id in tokens.get(text[start:], ())]

    def _find_writable(self) -> set[bytes]:
        """The prefixes from which tokens lead to a choice, where the vocabulary lacks some bytes."""
        tokens, longest = self._texts.tokens, self._texts.longest
        writable: set[bytes] = set()
        for choice in self._choices:
            is_open = [False] * len(choice) + [True]
            for begin in range(len(choice) - 1, -1, -1):
                stops = range(begin + 1, min(len(choice), begin + longest) + 1)
                is_open[begin] = any(is_open[stop] and choice[begin:stop] in tokens for stop in stops)
            if not is_open[0]:
                raise ValueError(choice.decode())
            writable.update(choice[:stop] for stop, ok in enumerate(is_open) if ok)
        return writable
