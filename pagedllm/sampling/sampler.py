"""Sampler: logits in, one token a row out, with logprobs where asked for. Rows never influence each other.

Order (SURFACE): raw logprobs, masks, bias, user callables, penalties, temperature, min_p, top_k, top_p, draw. The raw
logits of rows that want logprobs are kept aside only if something edits logits in this step. With
logprobs_mode="processed_logprobs" the logprobs are of the distribution that is drawn from.

Three parts: `prepare` reads the rows, on the host; `launch` draws, on the device, and leaves the results there;
`finish` makes an output of them once they have been fetched. Only user callables and processed logprobs make `launch`
read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.errors import RequestError
from pagedllm.ops.sampling import kept_weight, process_logits, sample, top_logprobs
from pagedllm.request import TokenLogprobs
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.processors import token_words

NO_PENALTIES = (1.0, 0.0, 0.0)
NO_TOKEN_LEFT = "allowed_token_ids, choices, bad_words and min_tokens together leave no token to choose"
NOTHING = (None,) * 4
Array = NDArray[Any]
EMPTY_IDS = np.zeros(0, np.int32)
EMPTY_VALUES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: list[int]  # [R]; -1 where the logits were not finite, and where there is an error
    logprobs: list[TokenLogprobs | None] | None  # [R], or None where nobody asked
    errors: dict[int, RequestError] = field(default_factory=dict)  # by place in R: a callable raised, say


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    token_ids: NDArray[np.int32]  # [R, 1 + k]: the row's own token, then the top k in order
    logprobs: NDArray[np.float32]  # [R, 1 + k]
    ranks: NDArray[np.int32]  # [R] of the row's own token


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """What a step's sampling reads, from the persistent rows; `arrays` are to be brought to the logits' device."""

    rows: list[int]  # [R]
    num_logprobs: NDArray[np.int32]  # [R], -1: none wanted
    has_user: bool
    edits: tuple[Array | None, ...] | None  # arguments of process_logits
    parameters: tuple[Array, ...]  # of `sample`
    errors: dict[int, RequestError]

    @property
    def wants_logprobs(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.num_logprobs >= 0)

    @property
    def arrays(self) -> list[Array]:
        return [*self.parameters, self.wants_logprobs, *(edit for edit in self.edits or () if edit is not None)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the logits' device."""

    tensors: list[Tensor]  # token ids [R]; of the rows that want logprobs, if any, what `_top` gives
    errors: dict[int, RequestError]


class Sampler:
    def __init__(
        self, namespace: str, vocab_size: int, rows: SamplingRows, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        self.namespace = namespace
        self.logprobs_mode = logprobs_mode
        self.vocab_size = vocab_size
        self.rows = rows
        self._all_tokens = token_words(range(vocab_size), vocab_size)

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.intp],
        output_positions: NDArray[np.int32],
        sample_indices: NDArray[np.int32],
    ) -> SamplerOutput:
        """All three parts, of logits on the CPU."""
        given = self.prepare(rows, output_positions, sample_indices)
        drawn = self.launch(logits, given, [torch.from_numpy(array) for array in given.arrays])
        return self.finish(given, drawn.errors, [tensor.numpy() for tensor in drawn.tensors])

    def prepare(
        self, rows: NDArray[np.intp], output_positions: NDArray[np.int32], sample_indices: NDArray[np.int32]
    ) -> SamplerInput:
        """rows [R] persistent rows, several times where several samples are drawn; output_positions, sample_indices [R]
        of the tokens to draw."""
        row_list: list[int] = rows.tolist()
        errors: dict[int, RequestError] = {}
        edits = self._edits(row_list, errors)
        state = self.rows
        columns = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
        return SamplerInput(
            rows=row_list,
            num_logprobs=state.num_logprobs[rows],
            has_user=bool(state.user) and not state.user.keys().isdisjoint(row_list),
            edits=edits,
            parameters=(*(column[rows] for column in columns), np.stack((sample_indices, output_positions), 1)),
            errors=errors,
        )

    def launch(self, logits: Tensor, given: SamplerInput, staged: Sequence[Tensor]) -> Drawn:
        """logits [R, vocab_size] float32, may be edited; staged: given.arrays on their device. The caller tells
        `SamplingRows.accept` which tokens it keeps."""
        parameters, (wants_logprobs, *rest) = staged[: len(given.parameters)], staged[len(given.parameters) :]
        edits = None
        if given.edits is not None:
            found = iter(rest)
            edits = tuple(None if edit is None else next(found) for edit in given.edits)
        errors = dict(given.errors)
        raw: Tensor | None = None
        if len(wants_logprobs) and self.logprobs_mode == "raw_logprobs":
            raw = logits if len(wants_logprobs) == len(given.rows) else logits[wants_logprobs]
            if raw is logits and (edits is not None or given.has_user):
                raw = logits.clone()
        if given.has_user:
            self._edit_around_users(logits, given.rows, edits, errors)
        elif edits is not None:
            process_logits(self.namespace, logits, *edits)
        token_ids = torch.empty(len(given.rows), dtype=torch.int32, device=logits.device)
        sample(self.namespace, token_ids, logits, *parameters)
        if errors:
            token_ids[list(errors)] = -1
        if len(wants_logprobs) and raw is None:
            raw = self._processed(logits[wants_logprobs], token_ids.tolist(), given)
        tensors = [token_ids]
        if raw is not None:
            tensors += self._top(raw, token_ids[wants_logprobs], int(given.num_logprobs.max()))
        return Drawn(tensors, errors)

    def finish(
        self, given: SamplerInput | None, errors: dict[int, RequestError], fetched: Sequence[Array]
    ) -> SamplerOutput:
        """fetched: `Drawn.tensors` on the host, from which everything is copied; given: None where they are only token
        ids that the decoder found."""
        token_ids, *top = fetched
        logprobs: list[TokenLogprobs | None] | None = None
        if given is not None and top:
            logprobs = [None] * len(given.rows)
            places = given.wants_logprobs
            entries = _token_logprobs(_joined(token_ids[places], *top), given.num_logprobs[places])
            for i, entry in zip(places.tolist(), entries, strict=True):
                logprobs[i] = entry
        return SamplerOutput(token_ids.tolist(), logprobs, errors)

    def _edit_around_users(
        self,
        logits: Tensor,
        rows: Sequence[int],
        edits: tuple[Tensor | None, ...] | None,
        errors: dict[int, RequestError],
    ) -> None:
        """Masks and bias, then each row's own callables, then penalties."""
        if edits is not None:
            process_logits(self.namespace, logits, *(*edits[:4], *NOTHING))
        for i, row in enumerate(rows):
            processors = self.rows.user.get(row)
            if processors is not None and i not in errors:
                try:
                    processors.apply(logits[i])
                except RequestError as error:
                    errors[i] = error.with_traceback(None)
        if edits is not None:
            process_logits(self.namespace, logits, *(*NOTHING, *edits[4:]))

    def _processed(self, processed: Tensor, token_ids: Sequence[int], given: SamplerInput) -> Tensor:
        """`processed`, the rows that want logprobs: by their temperature, and -inf where min_p, top_k or top_p drop a
        token. token_ids [R]"""
        state = self.rows
        for z, i in zip(processed, given.wants_logprobs.tolist(), strict=True):
            row = given.rows[i]
            temperature, top_k, top_p, min_p = (
                column[row].item() for column in (state.temperature, state.top_k, state.top_p, state.min_p)
            )
            if temperature == 0 or token_ids[i] < 0:
                continue
            if top_k > 0 or top_p < 1 or min_p > 0:
                keep = kept_weight(z, temperature, top_k, top_p, min_p) > 0
                z.masked_fill_(~keep, -torch.inf)
            z.div_(temperature)
        return processed

    def _edits(self, rows: Sequence[int], errors: dict[int, RequestError]) -> tuple[Array | None, ...] | None:
        """The arguments of process_logits after the logits, four for masks and bias, four for penalties; None where no
        row has any. A row whose masks leave no token is an error."""
        state = self.rows
        bitmask = bias = penalties = None
        if state.masks and not state.masks.keys().isdisjoint(rows):
            words = np.tile(self._all_tokens, (len(rows), 1))
            for i, row in enumerate(rows):
                for mask in state.masks.get(row, ()):
                    mask.fill(words[i])
                if not words[i].any():
                    errors[i] = RequestError("invalid_parameter", NO_TOKEN_LEFT)
            bitmask = words
        if state.bias and not state.bias.keys().isdisjoint(rows):
            bias = _ragged(rows, state.bias.get, EMPTY_VALUES)
        if state.counts and not state.counts.keys().isdisjoint(rows):

            def counted(row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
                counts = state.counts.get(row)
                return None if counts is None else (counts.ids, counts.counts)

            strengths = np.array([state.penalties[r] if r in state.counts else NO_PENALTIES for r in rows], np.float32)
            penalties = (strengths, *_ragged(rows, counted, EMPTY_IDS))
        if bitmask is None and bias is None and penalties is None:
            return None
        return (bitmask, *(bias or (None,) * 3), *(penalties or (None,) * 4))

    def top_logprobs(self, logits: Tensor, token_ids: Tensor, k: int) -> TopLogprobs:
        """Of each row's own token, token_ids [R] int32, and of its k likeliest; NaN where logits are not finite."""
        top = [tensor.cpu().numpy() for tensor in self._top(logits, token_ids, k)]
        return _joined(token_ids.cpu().numpy(), *top)

    def _top(self, logits: Tensor, token_ids: Tensor, k: int) -> list[Tensor]:
        """The k likeliest [R, k] and their logprobs [R, k], the logprob of the row's own token [R] and its rank [R]."""
        num_rows, device = len(token_ids), logits.device
        top_ids = torch.empty((num_rows, k), dtype=torch.int32, device=device)
        top_values = torch.empty((num_rows, k), dtype=torch.float32, device=device)
        values = torch.empty(num_rows, dtype=torch.float32, device=device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
        top_logprobs(self.namespace, top_ids, top_values, values, ranks, logits, token_ids)
        return [top_ids, top_values, values, ranks]


def _joined(token_ids: Array, top_ids: Array, top_values: Array, values: Array, ranks: Array) -> TopLogprobs:
    return TopLogprobs(
        np.concatenate((token_ids[:, None], top_ids), 1), np.concatenate((values[:, None], top_values), 1), ranks
    )


def _token_logprobs(found: TopLogprobs, ks: NDArray[np.int32]) -> list[TokenLogprobs | None]:
    """ks [R]: how many of the top each row wants."""
    return [
        TokenLogprobs(found.token_ids[i, : 1 + n].copy(), found.logprobs[i, : 1 + n].copy(), rank) if rank else None
        for i, (n, rank) in enumerate(zip(ks.tolist(), found.ranks.tolist(), strict=True))
    ]


def _ragged(
    rows: Sequence[int],
    get: Callable[[int], tuple[NDArray[np.int32], NDArray[np.generic]] | None],
    empty: NDArray[np.generic],
) -> tuple[Array, Array, Array]:
    """(offsets [R + 1], ids [n], values [n]) of what `get` has for each row."""
    parts = [get(row) or (EMPTY_IDS, empty) for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in parts], out=offsets[1:])
    ids = np.concatenate([ids for ids, _ in parts])
    values = np.concatenate([values for _, values in parts])
    return offsets, ids, values
