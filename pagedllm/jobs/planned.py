"""PlannedWork: a file of rows as one job. Scanned first, then run in the order that the offline plan gives.

A scan reads, checks and encodes a window of rows, finds in the journal what is done already, and keeps arrays of the
rest; token ids go to a file once they are many (tokens.py). Requests exist for the rows in the engine only. A window is
what one plan covers: MAX_ROWS rows; most files are one. Of every row 32 bytes stay to the end.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedllm.assembly import Assembly
from pagedllm.driver import drive, feed
from pagedllm.engine.offline_plan import plan_order
from pagedllm.jobs.continuation import cut_state
from pagedllm.jobs.journal import CUT, ERROR, UNKNOWN_TOKENS, Journal
from pagedllm.jobs.keys import KEY_BYTES, KEY_DTYPE
from pagedllm.jobs.options import Retry
from pagedllm.jobs.plan import EXPECTED_SHARE, JobPlan, is_worth_measuring, measure_speed
from pagedllm.jobs.report import JobReport
from pagedllm.jobs.rows import ReadyRow, RowReader
from pagedllm.jobs.score_rows import tell_end
from pagedllm.jobs.tokens import TOKEN_BYTES, TokenStore
from pagedllm.outputs import RequestOutput
from pagedllm.request import Request
from pagedllm.sampling_params import SamplingParams

SCAN_ROWS = 1024
MAX_ROWS = 2_000_000
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
        """A view: no row can be added while it is held."""
        return np.frombuffer(self.ids, KEY_DTYPE)

    def id_at(self, position: int) -> bytes:
        return bytes(self.ids[position * KEY_BYTES : (position + 1) * KEY_BYTES])


@dataclass(slots=True)
class Window:
    """Rows that are to be run; of those with one id, the first."""

    tokens: TokenStore
    positions: array[int] = field(default_factory=lambda: array("i"))  # of the rows in the table
    max_output_tokens: array[int] = field(default_factory=lambda: array("i"))
    num_samples: array[int] = field(default_factory=lambda: array("i"))  # that run for the row
    num_context_tokens: array[int] = field(default_factory=lambda: array("i"))  # 0 where nothing is scored
    params: list[SamplingParams | str] = field(default_factory=list)  # the row's own as JSON, where they are many
    order: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # to run, as indices of the above
    num_rows: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # with this id, for each
    num_shared_tokens: int = 0

    def __len__(self) -> int:
        return len(self.positions)


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
        retries: Retry | None,
        note_failed: Callable[[int], None],
        tell_scanned: Callable[[RowTable, Window], None],
        folder: Path | None,
    ) -> None:
        """finish: takes rows as they end; note_failed: rows that an earlier run left as failed; tell_scanned: called
        after each window was scanned; folder: for a file of token ids, if they are many."""
        self.table = RowTable()
        self._assembly = assembly
        self._reader = reader
        self._journal = journal
        self._report = report
        self._finish = finish
        self._retries = retries
        self._note_failed = note_failed
        self._tell_scanned = tell_scanned
        self._folder = folder
        self._window: Window | None = None  # that is being run
        self._is_scanned = False  # to the last row
        self._first_prompt = ""  # as the model sees it
        self._num_refused = 0
        self._num_built = 0
        self._in_flight: dict[int, tuple[bytes, int]] = {}  # by row: id, num_rows
        self._known_params: dict[str, SamplingParams] = {}  # by the row's own as JSON

    def steps(self) -> Generator[None, None, None]:
        """Runs everything; yields after each step."""
        token_text = self._assembly.builder.token_text
        source = feed(self._build_requests(), self._assembly.max_num_seqs)
        with contextlib.closing(drive(self._assembly.engine, source)) as steps:
            for ended in steps:
                finished = []
                for request in ended:
                    name, num_rows = self._in_flight.pop(request.prompt_index)
                    tell_end(request)
                    output = RequestOutput.of_request(request, None, None, token_text)
                    finished.append(Finished(name, output, num_rows, cut_state(request)))
                if finished:
                    self._finish(finished)
                yield

    @property
    def is_scanned(self) -> bool:
        """Whether the table has all rows of the job."""
        return self._is_scanned

    def plan(self, *, measures: bool, always: bool = False) -> JobPlan:
        """What `steps` will do, for the first window. measures: how fast, if it is a long job, or `always`."""
        window, assembly = self._open_window(), self._assembly
        plan, order = self._describe(window), window.order
        num_tokens = plan.num_new_tokens + plan.max_output_tokens // 2
        if len(order) and (always or (measures and is_worth_measuring(assembly, num_tokens))):
            picks = np.linspace(0, len(order) - 1, min(len(order), assembly.max_num_seqs)).astype(int)
            prompts = [window.tokens.token_ids(index) for index in order[picks].tolist()]
            plan = replace(plan, speed=measure_speed(assembly, prompts))
        return plan

    def _describe(self, window: Window) -> JobPlan:
        assembly, order, num_rows = self._assembly, window.order, window.num_rows
        lengths = window.tokens.num_bytes() // TOKEN_BYTES
        num_samples = np.asarray(window.num_samples, np.int64)
        limits = np.asarray(window.max_output_tokens, np.int64) * num_samples
        num_wanted = int((lengths + limits * EXPECTED_SHARE)[order].sum()) - window.num_shared_tokens
        return JobPlan(
            engine=assembly.info,
            num_rows=len(self.table.rows),
            is_whole=self._is_scanned,
            num_done=self._report.num_resumed,
            num_refused=self._num_refused,
            num_equal=len(num_rows) - len(order),
            num_to_run=len(order),
            num_prompt_tokens=int(lengths[order].sum()),
            num_equal_tokens=int((lengths[order] * (num_rows[order] - 1)).sum()),
            num_shared_tokens=window.num_shared_tokens,
            num_samples=int(num_samples[order].sum()),
            max_output_tokens=int(limits[order].sum()),
            num_blocks_wanted=len(order) + num_wanted // assembly.block_size,
            num_blocks=assembly.num_blocks,
            bytes_per_block=assembly.bytes_per_block,
            first_prompt=self._first_prompt,
        )

    def close(self) -> None:
        """Gives the file of token ids back. May be called again."""
        if self._window is not None:
            self._window.tokens.close()

    def _build_requests(self) -> Iterator[Request]:
        while True:
            window = self._open_window()
            for index in window.order:  # one at a time: a list of them would be 30 bytes each
                yield self._build_request(window, int(index))
            window.tokens.close()
            self._window = None
            del window  # before the next one is read
            if self._is_scanned:
                return

    def _build_request(self, window: Window, index: int) -> Request:
        params = window.params[index]
        if isinstance(params, str):
            params = self._reader.params_from(params)
        position = window.positions[index]
        row, name = self.table.rows[position], self.table.id_at(position)
        self._in_flight[row] = name, int(window.num_rows[index])
        cut = self._cut(name) if self._retries == "cut" else ()
        token_ids, num_context = window.tokens.token_ids(index), window.num_context_tokens[index]
        request = self._reader.build(row, token_ids, params, name, cut, num_context)
        request.rank = self._num_built
        self._num_built += 1
        return request

    def _cut(self, name: bytes) -> Sequence[int]:
        """What the journal has of a row that a length ended."""
        line = int(self._journal.find([name])[0])
        return (self._journal.cut_at(line) if line >= 0 else None) or ()

    def _open_window(self) -> Window:
        """The one under way, or the next."""
        if self._window is None:
            self._window = self._scan()
        return self._window

    def _scan(self) -> Window:
        """Reads and orders the rows of a window."""
        self._journal.index()
        window = Window(TokenStore(self._folder))
        while len(window) < MAX_ROWS and not self._is_scanned:
            ready = self._reader.read(SCAN_ROWS)
            self._is_scanned = len(ready) < SCAN_ROWS
            self._take(ready, window)
        is_first, window.num_rows = self._count_equal_rows(window)
        window.order = self._order(window, is_first)
        self._tell_scanned(self.table, window)
        self._report.add_work(self._describe(window).work, len(self.table.rows), is_all=self._is_scanned)
        return window

    def _count_equal_rows(self, window: Window) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Indices of the rows that are the first with their id, in input order; for each row how many have its id."""
        if not len(window):
            return window.order, window.num_rows
        ids = self.table.all_ids()[window.positions]
        _, first, counts = np.unique(ids, return_index=True, return_counts=True)
        num_rows = np.zeros(len(ids), np.int32)
        num_rows[first] = counts
        return np.sort(first).astype(np.int32), num_rows

    def _order(self, window: Window, indices: NDArray[np.int32]) -> NDArray[np.int32]:
        block_size, tokens = self._assembly.block_size, window.tokens
        expected = np.asarray(window.max_output_tokens, np.int32)
        order, num_shared_blocks = plan_order(
            tokens.__getitem__, tokens.num_bytes(), expected, TOKEN_BYTES * block_size, indices
        )
        window.num_shared_tokens = num_shared_blocks * block_size
        return order if self._assembly.engine.scheduler.policy.plans_ahead else indices

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
            window.positions.append(len(self.table.rows) - 1)
            window.tokens.append(ready.encoded.token_ids)
            window.max_output_tokens.append(self._reader.max_output_tokens(ready))
            window.num_samples.append(ready.params.num_samples)
            window.num_context_tokens.append(ready.encoded.num_context_tokens)
            window.params.append(self._kept_params(ready))
            if not self._first_prompt:
                self._first_prompt = ready.encoded.text or self._text_of(ready.encoded.token_ids)
        if refused:
            self._num_refused += len(refused)
            self._finish(refused)

    def _text_of(self, token_ids: list[int]) -> str:
        return self._assembly.builder.tokenizer.decode(token_ids, skip_special_tokens=False)

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
                    done = self._retries != "failed"
                else:
                    limit = self._reader.max_completion_tokens(ready)
                    done = num_tokens[i] <= limit
                    if ending == CUT and num_tokens[i] != limit:
                        done = num_tokens[i] == UNKNOWN_TOKENS and self._retries != "cut"
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
