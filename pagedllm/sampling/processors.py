"""What edits a row's logits before the draw. Everything that forbids tokens writes the one bit mask.

A mask row is ceil(vocab_size / 32) int32 words; bit i of word j allows token 32 j + i. Processors only clear bits, so
their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedllm.engine.scheduler_output import NewRequestData

MaskRow = NDArray[np.int32]  # [ceil(vocab_size / 32)]


def mask_width(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class MaskProcessor(Protocol):
    """Forbids tokens, by what the request has generated so far."""

    def fill(self, row: MaskRow) -> None:
        """Clears the bits of the tokens that may not come next."""
        ...

    def accept(self, token_id: int) -> None:
        """A token was appended to the output."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """The last tokens were taken back."""
        ...


def _words(token_ids: Iterable[int], vocab_size: int) -> MaskRow:
    """A mask row with exactly these bits set."""
    bits = np.zeros(mask_width(vocab_size) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class AllowedTokens:
    """allowed_token_ids: nothing else may ever come."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._allowed = _words(token_ids, vocab_size)

    def fill(self, row: MaskRow) -> None:
        row &= self._allowed

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        pass


class MinTokens:
    """min_tokens: until so many tokens are there, none that would end the output may come."""

    def __init__(self, min_tokens: int, ending_ids: Iterable[int], vocab_size: int) -> None:
        self._min_tokens = min_tokens
        self._others = ~_words(ending_ids, vocab_size)
        self._num_tokens = 0

    def fill(self, row: MaskRow) -> None:
        if self._num_tokens < self._min_tokens:
            row &= self._others

    def accept(self, token_id: int) -> None:
        self._num_tokens += 1

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens


def make_mask_processors(request: NewRequestData, vocab_size: int) -> tuple[MaskProcessor, ...]:
    params = request.sampling_params
    masks: list[MaskProcessor] = []
    if params.allowed_token_ids is not None:
        masks.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    ending_ids = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ending_ids.update(request.eos_token_ids)
    if params.min_tokens > 0 and ending_ids:
        masks.append(MinTokens(params.min_tokens, ending_ids, vocab_size))
    return tuple(masks)


class PenaltyCounts:
    """The distinct tokens of a request's prompt and output, each with its count in the output."""

    def __init__(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        distinct = np.unique(token_ids)
        self._index = {int(token_id): i for i, token_id in enumerate(distinct)}
        self._size = len(distinct)
        self._ids = np.concatenate((distinct, np.zeros(64, np.int32))).astype(np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self._counts[self._index[token_id]] += 1

    def add(self, token_id: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int32]:
        return self._counts[: self._size]
