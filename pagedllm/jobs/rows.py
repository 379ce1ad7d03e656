"""RowReader: lines of a job -> rows that can run, with their params and their name, or the reason why not."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pagedllm.assembly import Assembly
from pagedllm.errors import NotSupportedError, RequestError
from pagedllm.jobs.continuation import go_on
from pagedllm.jobs.formats import Row
from pagedllm.jobs.keys import EqualRows, hashed, row_id, row_key
from pagedllm.jobs.score_rows import paired
from pagedllm.jobs.source import Line
from pagedllm.outputs import RequestOutput
from pagedllm.request import Request
from pagedllm.request_builder import ChatOptions, EncodedPrompt, stream_key
from pagedllm.sampling_params import SamplingParams

CHUNK_ROWS = 64  # encoded in one batch


@dataclass(frozen=True, slots=True)
class ReadyRow:
    """Exactly one of params and error is set."""

    line: Line
    row: Row
    encoded: EncodedPrompt
    id: bytes
    params: SamplingParams | None = None
    error: RequestError | None = None

    def refusal(self) -> RequestOutput:
        assert self.error is not None
        return RequestOutput.of_refused("", self.row.index, self.error, self.encoded.text, self.encoded.token_ids, None)


class RowReader:
    """parse: of a line, its row's index and its fault; seed: the job's; defaults: sampling fields where a row says
    nothing; check_params: raises RequestError for a row's own; clock: what chat templates see; on_first_text: called
    once, when a prompt is sent as it is.
    """

    def __init__(
        self,
        assembly: Assembly,
        lines: Iterator[Line],
        parse: Callable[[bytes | None, int, str], Row],
        seed: int,
        defaults: Mapping[str, Any],
        *,
        check_params: Callable[[SamplingParams], None] = lambda params: None,
        clock: Callable[[], datetime] = datetime.now,
        on_first_text: Callable[[], None] = lambda: None,
    ) -> None:
        self._builder = assembly.builder
        self._lines = lines
        self._parse = parse
        self._seed = seed
        self.defaults = defaults
        self._plain_params = SamplingParams.from_json({}, defaults)  # of rows that bring none
        self._check_params = check_params
        self._chat = ChatOptions(clock=clock)
        self._on_first_text: Callable[[], None] | None = on_first_text
        self._equal_rows = EqualRows()

    def read(self, max_rows: int) -> list[ReadyRow]:
        """The next rows; none at the end."""
        return self.prepare(itertools.islice(self._lines, max_rows))

    def prepare(self, lines: Iterable[Line]) -> list[ReadyRow]:
        """Equal rows are numbered in the order they come here."""
        pairs = [(line, self._parse(line.text, line.row, line.fault)) for line in lines]
        if self._on_first_text is not None and any(row.prompt.text is not None for _, row in pairs):
            self._on_first_text()
            self._on_first_text = None
        encoded = self._builder.encode([row.prompt for _, row in pairs], self._chat)
        return [self._prepare(line, row, prompt) for (line, row), prompt in zip(pairs, encoded, strict=True)]

    def renamed(self, parse: Callable[[bytes | None, int, str], Row]) -> RowReader:
        """A reader that gives rows the same names, from lines of another form."""
        other = copy.copy(self)
        other._parse, other._equal_rows, other._on_first_text = parse, EqualRows(), None
        return other

    def params_from(self, sampling_params: str) -> SamplingParams:
        """Of a row that could run, from its own params as JSON."""
        return SamplingParams.from_json(json.loads(sampling_params), self.defaults)

    def max_output_tokens(self, ready: ReadyRow) -> int:
        assert ready.params is not None
        room = self._builder.max_model_len - len(ready.encoded.token_ids)
        return room if ready.params.max_tokens is None else min(ready.params.max_tokens, room)

    def max_completion_tokens(self, ready: ReadyRow) -> int:
        """What `completion_tokens` of its result may be."""
        if ready.row.continuation is not None:
            return len(ready.encoded.token_ids) - ready.encoded.num_context_tokens
        return self.max_output_tokens(ready)

    def build(
        self,
        index: int,
        token_ids: list[int],
        params: SamplingParams,
        row_id: bytes,
        cut: Sequence[int] = (),
        num_context_tokens: int = 0,
    ) -> Request:
        """cut: what an earlier run left of this row (continuation.py); num_context_tokens: that are not scored."""
        prompt = EncodedPrompt(None, token_ids, num_context_tokens=num_context_tokens)
        request = self._builder.build(str(index), index, prompt, params, stream_key(self._seed, row_id))
        go_on(request, cut)
        return request

    def _prepare(self, line: Line, row: Row, encoded: EncodedPrompt) -> ReadyRow:
        try:
            if encoded.error is not None:
                raise encoded.error
            if row.continuation is not None:
                encoded = paired(self._builder, row.prompt, row.continuation, self._chat)
            params = self._params(row)
            self._builder.check_params(params)
            self._builder.check_prompt(encoded, params)
        except RequestError as error:
            name = hashed(line.text or b"", f"{error.code}: {error.message}".encode())
            return ReadyRow(line, row, encoded, name, error=error)
        own = {"continuation": encoded.num_context_tokens} if row.continuation is not None else row.sampling_params
        key = row.identity or row_key(encoded.token_ids, own)
        draws_by_job = not params.is_greedy and params.seed in (None, -1)
        name = row_id(key, self._equal_rows.number(key) if draws_by_job else None)
        return ReadyRow(line, row, encoded, name, params)

    def _params(self, row: Row) -> SamplingParams:
        if not row.sampling_params:
            return self._plain_params
        try:
            params = SamplingParams.from_json(row.sampling_params, self.defaults)
        except NotSupportedError as error:
            raise RequestError("unsupported", str(error), field="sampling_params") from None
        self._check_params(params)
        return params
