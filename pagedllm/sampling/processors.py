"""What edits a row's logits before the draw. Everything that forbids tokens writes the one bit mask.

A mask row is ceil(vocab_size / 32) int32 words; bit i of word j allows token 32 j + i. Processors only clear bits, so
their order does not matter. User callables are not masks: they see a row's logits and give others back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.choices import ChoiceTable, words_of
from pagedllm.engine.scheduler_output import NewRequestData
from pagedllm.errors import RequestError

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


def token_words(token_ids: Iterable[int], vocab_size: int) -> MaskRow:
    """A mask row with exactly these bits set."""
    bits = np.zeros(mask_width(vocab_size) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class AllowedTokens:
    """allowed_token_ids: nothing else may ever come."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._allowed = token_words(token_ids, vocab_size)

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
        self._others = ~token_words(ending_ids, vocab_size)
        self._num_tokens = 0

    def fill(self, row: MaskRow) -> None:
        if self._num_tokens < self._min_tokens:
            row &= self._others

    def accept(self, token_id: int) -> None:
        self._num_tokens += 1

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens


class BadWords:
    """bad_words: each is a sequence of tokens whose last one may not come after the others, in the output alone."""

    def __init__(self, sequences: Iterable[tuple[int, ...]], vocab_size: int) -> None:
        distinct = set(sequences)
        self._always = ~token_words((ids[0] for ids in distinct if len(ids) == 1), vocab_size)
        self._sequences = sorted(ids for ids in distinct if len(ids) > 1)
        self._output: list[int] = []

    def fill(self, row: MaskRow) -> None:
        row &= self._always
        for *before, last in self._sequences:
            if self._output[-len(before) :] == before:
                row.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)

    def accept(self, token_id: int) -> None:
        self._output.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self._output[len(self._output) - num_tokens :]


class Choices:
    """structured_outputs.choice: tokens that lead to one of them; what ends an output may come at a whole one only."""

    def __init__(self, table: ChoiceTable, ending_ids: Iterable[int]) -> None:
        self._table = table
        self._ending = words_of(ending_ids)
        self._prefixes = [b""]  # of the output so far, by its number of tokens

    def fill(self, row: MaskRow) -> None:
        state, ending, words = self._table.state(self._prefixes[-1]), self._ending, row.view(np.uint32)
        kept = [(i, int(words[i]) & bits & ~ending.get(i, 0)) for i, bits in state.words.items()]
        if state.is_complete:
            kept += [(i, int(words[i]) & bits) for i, bits in ending.items()]
        words.fill(0)
        for i, bits in kept:
            words[i] |= bits

    def accept(self, token_id: int) -> None:
        self._prefixes.append(self._prefixes[-1] + self._table.prefix((token_id,)))

    def rollback(self, num_tokens: int) -> None:
        del self._prefixes[len(self._prefixes) - num_tokens :]


def make_mask_processors(request: NewRequestData, vocab_size: int) -> tuple[MaskProcessor, ...]:
    params = request.sampling_params
    masks: list[MaskProcessor] = []
    if params.allowed_token_ids is not None:
        masks.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    ending_ids = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ending_ids.update(request.eos_token_ids)
    if request.choices is not None:
        masks.append(Choices(request.choices, ending_ids))
    if params.min_tokens > 0 and ending_ids:
        masks.append(MinTokens(params.min_tokens, ending_ids, vocab_size))
    if request.bad_word_ids:
        masks.append(BadWords(request.bad_word_ids, vocab_size))
    return tuple(masks)


class UserProcessors:
    """A request's own callables, f(token_ids, logits) -> logits, one after the other.

    token_ids: the output so far, a list of its own. logits: [vocab_size] float32, a tensor of its own, which may be
    edited in place; what comes back must be of that shape. Each call sees copies, so no other request can be touched.
    """

    def __init__(self, functions: Sequence[Callable[[list[int], Tensor], Any]], output: Sequence[int]) -> None:
        self._functions = tuple(functions)
        self._output = list(output)

    def accept(self, token_id: int) -> None:
        self._output.append(token_id)

    def apply(self, logits: Tensor) -> None:
        """Edits [vocab_size] logits in place. RequestError if a callable raises, or gives back what cannot be drawn."""
        with torch.inference_mode(False), torch.no_grad():  # callables get a plain tensor, whatever they do with it
            edited = torch.empty(logits.shape, dtype=torch.float32, device="cpu").copy_(logits)
            for index, function in enumerate(self._functions):
                edited = self._call(index, function, edited)
        if _can_be_drawn(logits) and not _can_be_drawn(edited):
            reason = "logits_processors gave logits with NaN or infinity, or -inf for every token"
            raise RequestError("non_finite_logits", reason, field="logits_processors")
        logits.copy_(edited)

    def _call(self, index: int, function: Callable[[list[int], Tensor], Any], logits: Tensor) -> Tensor:
        result: Any = None
        try:
            result = function(list(self._output), logits)
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
        else:
            reason = _what_is_wrong(result, logits.shape)
        if not reason:
            return cast(Tensor, result).detach().to(device="cpu", dtype=torch.float32)
        # raised here, so that it has no context: that one's traceback would hold the engine
        name = getattr(function, "__name__", type(function).__name__)
        raise RequestError(
            "invalid_parameter", f"logits_processors[{index}] ({name}) {reason}", field="logits_processors"
        )


def _what_is_wrong(result: object, shape: torch.Size) -> str:
    if not isinstance(result, Tensor):
        return f"must return a tensor of logits, got {type(result).__name__}"
    if result.shape != shape:
        return f"must return logits of shape {tuple(shape)}, got {tuple(result.shape)}"
    if result.is_complex():
        return f"must return real logits, got {result.dtype}"
    return ""


def _can_be_drawn(logits: Tensor) -> bool:
    """Neither NaN nor +inf, and something above -inf."""
    return bool(logits.max().isfinite())


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
