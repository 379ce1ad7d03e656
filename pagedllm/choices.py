"""ChoiceTable: which tokens may come next so that an output ends up as one of a set of texts.

Every way to cut a text into tokens is allowed, not the tokenizer's own alone: a prefix of bytes is the whole state, and
a token may follow if some choice begins with the prefix and the token's bytes. Special tokens are no text. Prefixes are
looked up in the sorted choices, so 5,000 of them cost their bytes, and what was worked out for a prefix is kept.

    choices  yes, yesterday, no        after "ye":  "s", "st", "ster", ...     after "yes":  the end, "t", "terday", ...

Plain Python and numpy: the sampler's mask and the engine's end both read it. Made once for a list of choices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

ABOVE = b"\xff"  # stands in no text: sorts behind everything that begins with a prefix
NUM_KEPT_AS_MASK = 16  # tokens; masks of fewer are made when asked for


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
        self.has_all_bytes = all(bytes((byte,)) in tokens for byte in range(256))


class ChoiceTable:
    def __init__(self, choices: Sequence[str], texts: TokenTexts) -> None:
        """Raises ValueError naming a choice that the vocabulary cannot write."""
        self._texts = texts
        self._choices = sorted({choice.encode() for choice in choices})
        self.longest = max(map(len, self._choices))
        self._writable = None if texts.has_all_bytes else self._find_writable()
        self._next: dict[bytes, list[int]] = {}
        self._masks: dict[bytes, NDArray[np.int32]] = {}

    def prefix(self, token_ids: Sequence[int]) -> bytes:
        """What these tokens read as; those that are no text read as nothing."""
        return b"".join([self._texts.of_token.get(token_id, b"") for token_id in token_ids])

    def is_complete(self, prefix: bytes) -> bool:
        """Whether it is a choice."""
        begin, end = self._range(prefix)
        return begin < end and len(self._choices[begin]) == len(prefix)

    def is_final(self, prefix: bytes) -> bool:
        """Whether it is a choice and the beginning of no other."""
        begin, end = self._range(prefix)
        return end - begin == 1 and len(self._choices[begin]) == len(prefix)

    def next_tokens(self, prefix: bytes) -> list[int]:
        """The tokens that may follow; none where no choice begins like that or none goes on."""
        found = self._next.get(prefix)
        if found is None:
            found = self._next[prefix] = self._find_next(prefix)
        return found

    def mask(self, prefix: bytes, num_words: int) -> NDArray[np.int32]:
        """`next_tokens` as bits: bit i of word j is token 32 j + i. Not to be edited."""
        mask = self._masks.get(prefix)
        if mask is None:
            token_ids = np.array(self.next_tokens(prefix), np.int64)
            words = np.zeros(num_words, np.uint32)
            np.bitwise_or.at(words, token_ids >> 5, np.uint32(1) << (token_ids & 31).astype(np.uint32))
            mask = words.view(np.int32)
            if len(token_ids) > NUM_KEPT_AS_MASK:
                self._masks[prefix] = mask
        return mask

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
