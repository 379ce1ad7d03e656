"""A job: rows of a file through the engine, results in input order, as they finish.

`open_job` checks the files and the first row before a model is loaded; `Job.run` reads a bounded window of rows ahead,
so neither a huge file nor a slow first row fills the memory. A bad row costs itself only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

from pagedllm.assembly import Assembly
from pagedllm.driver import drive
from pagedllm.errors import NotSupportedError, PagedLLMError, RequestError
from pagedllm.jobs.files import IfExists, ResultFile, open_input
from pagedllm.jobs.formats import Row, count_rows, read_rows, result_line
from pagedllm.outputs import RequestOutput, result_columns
from pagedllm.request import Request
from pagedllm.request_builder import ChatOptions, EncodedPrompt, stream_key
from pagedllm.sampling_params import SamplingParams

CHUNK_ROWS = 64  # encoded in one batch
SEQS_AHEAD = 4  # requests in the engine, in units of what it runs at once: enough to choose from
MAX_HELD_BYTES = 64 << 20  # of result lines that wait for an earlier row
NUM_FIRST_ROWS = 100  # if all of these fail, so will the rest


class TooManyFailures(PagedLLMError):
    """The first rows all failed; the message quotes the first reason."""


@dataclass(slots=True)
class JobReport:
    """Counts of a job, so far or at its end."""

    num_rows: int = 0
    num_failed: int = 0
    num_cut: int = 0  # ended by a length
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    peak_num_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    bytes_per_block: int = 0
    first_error: str = ""

    def count(self, output: RequestOutput) -> None:
        self.num_rows += 1
        if output.error is not None:
            self.num_failed += 1
            self.first_error = self.first_error or f"row {output.index}: {output.error.code}: {output.error.message}"
            return
        completion = output.outputs[0]
        self.num_cut += completion.finish_reason == "length"
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_completion_tokens += len(completion.token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_preemptions += output.metrics.num_preemptions if output.metrics else 0


class Job:
    """Rows in, lines out. Made by `open_job`, which closes the files."""

    def __init__(
        self, input: str, rows: Iterator[Row], results: ResultFile, sampling_params: Mapping[str, Any]
    ) -> None:
        self._input = input
        self._rows = rows
        self._results = results
        self._given_params = sampling_params
        self.report = JobReport()

    @property
    def partial(self) -> Path | None:
        """The file that holds what is written until the job is finished."""
        return self._results.partial

    @property
    def num_written(self) -> int:
        return self._results.num_lines

    def count_rows(self) -> int | None:
        """How many rows the input has; None where it cannot be read twice."""
        return None if self._input == "-" or not os.path.isfile(self._input) else count_rows(self._input)

    def run(self, assembly: Assembly, seed: int, on_progress: Callable[[JobReport], None] | None = None) -> JobReport:
        """Runs all rows and gives the result file its name; on_progress is told after each step.

        Raises TooManyFailures, ModelError for the model's own sampling defaults, and OSError where a result cannot be
        written; what is written then stays.
        """
        started = time.perf_counter()
        assembly.defaults.params()  # a wrong generation_config.json is not every row's error
        defaults = {**assembly.defaults.values, **self._given_params}
        work = _Work(assembly, self._rows, seed, defaults)
        assembly.notices.tell(f"rows without sampling_params: {assembly.defaults.describe(self._given_params)}", INFO)
        report = self.report
        report.num_blocks, report.block_size = assembly.num_blocks, assembly.block_size
        report.bytes_per_block = assembly.bytes_per_block
        with contextlib.closing(work.steps()) as steps:
            for finished in steps:
                for row, output in finished:
                    self._results.write(result_line(row, result_columns(output)))
                    report.count(output)
                    if report.num_rows == report.num_failed == NUM_FIRST_ROWS:
                        raise TooManyFailures(f"the first {NUM_FIRST_ROWS} rows all failed; {report.first_error}")
                report.seconds = time.perf_counter() - started
                report.peak_num_blocks = assembly.engine.stats.peak_num_blocks
                if on_progress is not None:
                    on_progress(report)
        self._results.commit()
        return report


class _Work:
    """The rows of a job on their way: read, in the engine, or finished and waiting for an earlier one."""

    def __init__(self, assembly: Assembly, rows: Iterator[Row], seed: int, defaults: Mapping[str, Any]) -> None:
        self._assembly = assembly
        self._rows = rows
        self._seed = seed
        self._defaults = defaults
        self._max_in_flight = SEQS_AHEAD * assembly.max_num_seqs
        self._chunk_rows = min(CHUNK_ROWS, self._max_in_flight)
        self._read: dict[int, Row] = {}  # by index, until its output is yielded
        self._encoded: dict[int, EncodedPrompt] = {}  # in the engine
        self._finished: dict[int, RequestOutput] = {}
        self._held_bytes = 0
        self._num_equal_rows: Counter[int] = Counter()
        self._next_index = 0

    def steps(self) -> Generator[list[tuple[Row, RequestOutput]], None, None]:
        """After each step the rows that come next in input order and are finished, perhaps none."""
        token_text = self._assembly.builder.token_text
        with contextlib.closing(drive(self._assembly.engine, self._source)) as steps:
            for ended in steps:
                for request in ended:
                    encoded = self._encoded.pop(request.prompt_index)
                    self._finish(RequestOutput.of_request(request, encoded.text, None, token_text))
                yield self._ready()

    def _source(self, num_in_flight: int) -> list[Request] | None:
        """Reads some rows if there is room for them; those that can run become requests."""
        room = self._max_in_flight - num_in_flight
        if room < self._chunk_rows or (self._held_bytes > MAX_HELD_BYTES and num_in_flight):
            return []
        rows = list(itertools.islice(self._rows, self._chunk_rows))
        if not rows:
            return None
        requests = []
        encoded_rows = self._assembly.builder.encode([row.prompt for row in rows], ChatOptions())
        for row, encoded in zip(rows, encoded_rows, strict=True):
            self._read[row.index] = row
            try:
                requests.append(self._build(row, encoded))
                self._encoded[row.index] = encoded
            except RequestError as error:
                refused = RequestOutput.of_refused("", row.index, error, encoded.text, encoded.token_ids, None)
                self._finish(refused)
        return requests

    def _build(self, row: Row, encoded: EncodedPrompt) -> Request:
        """Raises RequestError where the row cannot run."""
        builder = self._assembly.builder
        if encoded.error is not None:
            raise encoded.error
        params = self._params(row)
        builder.check_params(params)
        builder.check_prompt(encoded, params)
        seed = 0
        if not params.is_greedy and params.seed in (None, -1):
            key = row_key(encoded.token_ids, row.sampling_params)
            seed = stream_key(self._seed, key, self._num_equal_rows[key])
            self._num_equal_rows[key] += 1
        return builder.build(str(row.index), row.index, encoded, params, seed)

    def _params(self, row: Row) -> SamplingParams:
        try:
            params = SamplingParams.from_json(row.sampling_params, self._defaults)
        except NotSupportedError as error:
            raise RequestError("unsupported", str(error), field="sampling_params") from None
        if params.logprobs is not None:
            raise RequestError("unsupported", "logprobs in files are not supported yet: leave it out", field="logprobs")
        return params

    def _ready(self) -> list[tuple[Row, RequestOutput]]:
        ready = []
        while self._next_index in self._finished:
            output = self._finished.pop(self._next_index)
            row = self._read.pop(self._next_index)
            self._held_bytes -= _num_bytes(row, output)
            self._next_index += 1
            ready.append((row, output))
        return ready

    def _finish(self, output: RequestOutput) -> None:
        self._finished[output.index] = output
        self._held_bytes += _num_bytes(self._read[output.index], output)


@contextlib.contextmanager
def open_job(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    sampling_params: Mapping[str, Any] | None = None,
    if_exists: IfExists | None = None,
) -> Iterator[Job]:
    """Checks parameters and files, and opens them; "-" is stdin or stdout. No model is needed for it.

    Raises ValueError or NotSupportedError for parameters, OSError for files (as ResultFile tells), and ValueError where
    a field of the first row has the name of a result column.
    """
    given = dict(sampling_params or {})
    if SamplingParams.from_json(given).logprobs is not None:
        raise NotSupportedError("logprobs in files are not supported yet: leave it out")
    with open_input(os.fspath(input)) as stream:
        results = ResultFile(os.fspath(output), os.fspath(input), if_exists)
        try:
            rows = read_rows(stream)
            first = list(itertools.islice(rows, 1))
            if first and first[0].clash is not None:
                raise ValueError(f"{input}: the field {first[0].clash!r} has the name of a result column: rename it")
            yield Job(os.fspath(input), itertools.chain(first, rows), results, given)
        finally:
            results.close()


def row_key(token_ids: list[int], sampling_params: Mapping[str, Any]) -> int:
    """64 bits that name a row by its content: the final prompt ids and the row's own sampling_params."""
    content = json.dumps(sampling_params, sort_keys=True).encode()
    return stream_key(array("i", token_ids).tobytes(), content)


def _num_bytes(row: Row, output: RequestOutput) -> int:
    """About what a finished row holds."""
    return len(row.raw or "") + len(output.text or "") + 4 * len(output.prompt_token_ids)
