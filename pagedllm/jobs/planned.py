"""PlannedWork: a file of rows as one job. Scanned first, then run in the order that the offline plan gives.

A scan reads, checks and encodes a window of rows, finds in the journal what is done already, and keeps arrays of the
rest: token ids, bounds, lengths. Requests exist for the rows in the engine only. A window is what one plan covers:
MAX_ROWS rows or MAX_TOKENS tokens, whichever comes first; most files are one. Of every row 32 bytes stay to the end.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagedllm.assembly import Assembly
from pagedllm.driver import drive
from pagedllm.engine.offline_plan import plan_order
from pagedllm.jobs.continuation import cut_state
from pagedllm.jobs.journal import CUT, ERROR, Journal
from pagedllm.jobs.keys import KEY_BYTES, KEY_DTYPE
from pagedllm.jobs.report import JobReport
from pagedllm.jobs.rows import ReadyRow, RowReader
from pagedllm.jobs.stream import SEQS_AHEAD
from pagedllm.outputs import RequestOutput
from pagedllm.request import Request
from pagedllm.sampling_params import SamplingParams

SCAN_ROWS = 1024
MAX_ROWS = 2_000_000
MAX_TOKENS = 32_000_000
MAX_KNOWN_PARAMS = 4096
NO_PLACE = -1  # of a row whose text gives nothing to the result


@dataclass(slots=True)
class RowTable:
    """All rows of the job that were scanned, in input order."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))
    ids: bytearray = field(default_factory=bytearray)

    def add(self, ready: ReadyRow) -> None:
        self.rows.append(ready.line.row)
        self.places.append(NO_PLACE if ready.row.raw is None else ready.line.place)
        self.ids += ready.id

    def all_ids(self) -> NDArray[np.bytes_]:
        return np.frombuffer(bytes(self.ids), KEY_DTYPE)


@dataclass(slots=True)
class Window:
    """Rows that are to be run."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    ids: bytearray = field(default_factory=bytearray)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    ends: array[int] = field(default_factory=lambda: array("q", [0]))  # of row i: token_ids[ends[i] : ends[i + 1]]
    max_output_tokens: array[int] = field(default_factory=lambda: array("i"))
    params: list[SamplingParams | str] = field(default_factory=list)  # the row's own as JSON, where they are many
    num_rows: list[int] = field(default_factory=list)  # how many rows of the input have this id

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Finished:
    id: bytes
    output: RequestOutput
    num_rows: int
    cut: list[int] = field(default_factory=list)  # what --retry cut goes on from


class PlannedWork:
    def __init__(
        self,
        assembly: Assembly,
        reader: RowReader,
        journal: Journal,
        report: JobReport,
        finish: Callable[[list[Finished]], None],
        *,
        retries_failed: bool,
        continues_cut: bool,
        note_failed: Callable[[int], None],
        tell_scanned: Callable[[RowTable, Window], None],
    ) -> None:
        """finish: takes rows as they end; note_failed: rows that an earlier run left as failed; tell_scanned: called
        after each window was scanned."""
        self.table = RowTable()
        self._assembly = assembly
        self._reader = reader
        self._journal = journal
        self._report = report
        self._finish = finish
        self._retries_failed = retries_failed
        self._continues_cut = continues_cut
        self._note_failed = note_failed
        self._tell_scanned = tell_scanned
        self._max_in_flight = SEQS_AHEAD * assembly.max_num_seqs
        self._num_built = 0
        self._requests = self._build_requests()
        self._in_flight: dict[int, tuple[bytes, int]] = {}  # by row: id, num_rows
        self._known_params: dict[str, SamplingParams] = {}  # by the row's own as JSON

    def steps(self) -> Generator[None, None, None]:
        """Runs everything; yields after each step."""
        token_text = self._assembly.builder.token_text
        with contextlib.closing(drive(self._assembly.engine, self._source)) as steps:
            for ended in steps:
                finished = []
                for request in ended:
                    name, num_rows = self._in_flight.pop(request.prompt_index)
                    output = RequestOutput.of_request(request, None, None, token_text)
                    finished.append(Finished(name, output, num_rows, cut_state(request)))
                if finished:
                    self._finish(finished)
                yield

    def _source(self, num_in_flight: int) -> list[Request] | None:
        if num_in_flight > self._max_in_flight // 2:
            return []
        requests: list[Request] = []
        for request in self._requests:
            requests.append(request)
            if len(requests) + num_in_flight >= self._max_in_flight:
                break
        return requests or None

    def _build_requests(self) -> Iterator[Request]:
        while True:
            window, is_last = self._scan()
            for position in self._order(window):
                begin, end = window.ends[position], window.ends[position + 1]
                params = window.params[position]
                if isinstance(params, str):
                    params = self._reader.params_from(params)
                row, name = window.rows[position], _id_at(window.ids, position)
                self._in_flight[row] = name, window.num_rows[position]
                cut = self._cut(name) if self._continues_cut else ()
                request = self._reader.build(row, window.token_ids[begin:end].tolist(), params, name, cut)
                request.rank = self._num_built
                self._num_built += 1
                yield request
            if is_last:
                return

    def _cut(self, name: bytes) -> Sequence[int]:
        """What the journal has of a row that a length ended."""
        line = int(self._journal.find([name])[0])
        return (self._journal.cut_at(line) if line >= 0 else None) or ()

    def _order(self, window: Window) -> Sequence[int]:
        if not self._assembly.engine.scheduler.policy.plans_ahead:
            return range(len(window))
        ids, size = memoryview(window.token_ids).cast("B"), window.token_ids.itemsize
        prompts = [bytes(ids[size * begin : size * end]) for begin, end in pairwise(window.ends)]
        return plan_order(prompts, window.max_output_tokens, size * self._assembly.block_size)

    def _scan(self) -> tuple[Window, bool]:
        """Reads a window's rows; True if they are the last."""
        self._journal.index()
        window, is_last = Window(), False
        while len(window) < MAX_ROWS and len(window.token_ids) < MAX_TOKENS and not is_last:
            ready = self._reader.read(SCAN_ROWS)
            is_last = len(ready) < SCAN_ROWS
            self._take(ready, window)
        window = _without_equal_rows(window)
        self._tell_scanned(self.table, window)
        return window, is_last

    def _take(self, rows: list[ReadyRow], window: Window) -> None:
        if not rows:
            return
        refused = []
        is_done = self._are_done(rows)
        for ready, done in zip(rows, is_done, strict=True):
            self.table.add(ready)
            if done:
                continue
            if ready.params is None:
                refused.append(Finished(ready.id, ready.refusal(), 1))
                continue
            window.rows.append(ready.line.row)
            window.ids += ready.id
            window.token_ids.extend(ready.encoded.token_ids)
            window.ends.append(len(window.token_ids))
            window.max_output_tokens.append(self._reader.max_output_tokens(ready))
            window.params.append(self._kept_params(ready))
            window.num_rows.append(1)
        if refused:
            self._finish(refused)

    def _are_done(self, rows: list[ReadyRow]) -> list[bool]:
        """What the journal has, unless it would end otherwise now."""
        lines = self._journal.find([ready.id for ready in rows])
        if lines.max() < 0:
            return [False] * len(rows)
        endings, num_tokens = self._journal.endings(lines).tolist(), self._journal.num_tokens(lines).tolist()
        is_there = (lines >= 0).tolist()
        is_done, num_failed, num_cut = [], 0, 0
        for i, ready in enumerate(rows):
            ending, done = endings[i], is_there[i]
            if done and ready.params is not None:
                if ending == ERROR:
                    done = not self._retries_failed
                else:
                    limit = self._reader.max_output_tokens(ready)
                    done = num_tokens[i] == limit if ending == CUT else num_tokens[i] <= limit
            is_done.append(done)
            num_failed += done and ending == ERROR
            num_cut += done and ending == CUT
        self._report.count_resumed(sum(is_done), num_failed, num_cut)
        for ready, done, ending in zip(rows, is_done, endings, strict=True):
            if done and ending == ERROR:
                self._note_failed(ready.line.row)
        return is_done

    def _kept_params(self, ready: ReadyRow) -> SamplingParams | str:
        """One object for equal params; beyond so many different ones, their text."""
        assert ready.params is not None
        own = ready.row.sampling_params
        if not own:
            return ready.params
        text = json.dumps(own)
        if text not in self._known_params and len(self._known_params) >= MAX_KNOWN_PARAMS:
            return text
        return self._known_params.setdefault(text, ready.params)


def _without_equal_rows(window: Window) -> Window:
    """Each id once, where it stands first; equal rows are counted there."""
    ids = np.frombuffer(bytes(window.ids), KEY_DTYPE)
    _, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(first) == len(ids):
        return window
    kept = Window()
    order = np.argsort(first)
    for position, num_rows in zip(first[order].tolist(), counts[order].tolist(), strict=True):
        kept.rows.append(window.rows[position])
        kept.ids += _id_at(window.ids, position)
        kept.token_ids.extend(window.token_ids[window.ends[position] : window.ends[position + 1]])
        kept.ends.append(len(kept.token_ids))
        kept.max_output_tokens.append(window.max_output_tokens[position])
        kept.params.append(window.params[position])
        kept.num_rows.append(num_rows)
    return kept


def _id_at(ids: bytearray, position: int) -> bytes:
    return bytes(ids[position * KEY_BYTES : (position + 1) * KEY_BYTES])
